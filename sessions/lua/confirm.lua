-- Mark silences as recorded: remove them from the in-flight set and start the timer of the next guide message.
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:inflight  sorted set: session id by end of lease, ms
-- KEYS[3]  {shard}:policies  hash: version, body
-- KEYS[4]  {shard}:counts    hash: how many sessions are armed and paused (see note_activity)
-- KEYS[5…] {shard}:s:<id>    hash, one key a silence (fields: see note_activity)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long a session is kept, ms
-- ARGV[3…] two a silence: session id, arming
-- Returns how many were still in flight under that arming. Idempotent.
local policies = read_policies(KEYS[3])
if not policies then return NO_POLICIES end

local confirmed = 0
for number = 0, #KEYS - 5 do
  local key, id, armed_at = KEYS[5 + number], ARGV[3 + number * 2], ARGV[4 + number * 2]
  local held = redis.call('HMGET', key, 'a', 'n', 't', 'k', 'w')
  if held[1] == armed_at and redis.call('ZREM', KEYS[2], id) == 1 then
    confirmed = confirmed + 1
    local nudges, tag = (held[2] or 0) + 1, held[3] or 'default'
    if nudges < policy_of(policies, tag)[4] and not held[4] then
      local deadline = now + silence_threshold(policies, tag, nudges)
      redis.call('HSET', key, 'n', nudges, 's', armed_at, 'a', next_arming(armed_at), 'd', deadline)
      redis.call('HDEL', key, 'y')
      redis.call('ZADD', KEYS[1], deadline, id)
      redis.call('PEXPIRE', key, ARGV[2])
    else
      redis.call('HSET', key, 'n', nudges, 's', armed_at, 'd', '0')
      redis.call('HDEL', key, 'w', 'y')
      recount(KEYS[4], counted_before(held[5], 1, held[3]), false)
    end
  end
end
return confirmed
