-- Record a silence for an expired key of a gateway. Every listener receives the event; the first call counts.
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:policies  hash: version, body
-- KEYS[3]  {shard}:counts    hash: how many sessions are armed and paused (see note_activity)
-- KEYS[4]  {shard}:s:<id>    hash: the session (fields: see note_activity)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long a session is kept, ms
-- ARGV[3]  session id
-- ARGV[4]  user id
-- ARGV[5]  tag or ''
-- ARGV[6]  the gateway's key
-- ARGV[7]  window, ms: a second expiry of the same user within it is the same silence
-- ARGV[8]  how long ago the key expired, ms
-- Returns 1, or 0 where the silence is already recorded or the session sends frames itself.
local policies = read_policies(KEYS[2])
if not policies then return NO_POLICIES end

local expired_us = now_us - ARGV[8] * 1000
local expired = math.floor(expired_us / 1000)
local held = redis.call('HMGET', KEYS[4], 'a', 'k', 'w', 'd', 't')
if held[1] and (not held[2] or expired_us - held[1] < ARGV[7] * 1000) then return 0 end
local tag = ARGV[5] ~= '' and ARGV[5] or 'default'
local as = 'a:' .. policy_of_timer(policies_of(policies, tag)).key
recount(KEYS[3], counted_before(held[3], (held[4] or 0) + 0, held[5]), as)
redis.call('HDEL', KEYS[4], 'w', 'y', 'h', 'i')
if as ~= 'a:' .. tag then redis.call('HSET', KEYS[4], 'w', as) end
redis.call('HSET', KEYS[4], 'u', ARGV[4], 't', tag, 'k', ARGV[6],
  'a', next_arming(held[1], expired_us), 'd', expired, 'n', 0)
redis.call('ZADD', KEYS[1], expired, ARGV[3])
redis.call('PEXPIRE', KEYS[4], ARGV[2])
return 1
