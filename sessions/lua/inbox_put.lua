-- Put a message into the inbox of a session, once for its key.
-- KEYS[1]  {shard}:s:<id>    hash: the session (fields: see note_activity)
-- KEYS[2]  {shard}:in:<id>   stream: its last messages; the entry's id is the cursor; field m: JSON
-- KEYS[3]  {shard}:once:<id> sorted set: keys of messages by when they came, ms
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long an inbox is kept after its last message, ms
-- ARGV[3]  how many messages it keeps
-- ARGV[4]  how many keys it remembers
-- ARGV[5]  the message's key, '' for one that nobody repeats
-- ARGV[6]  the message, JSON
-- ARGV[7]  side of a person who wrote it (u or a), '' for a message of the house: it goes only where a session is
-- ARGV[8]  seq of that side or ''; below 0: a later one is on its way, so it is a repeat or a replay
-- Returns 'stored' and its cursor, or why not ('duplicate', 'replayed', 'no_session') and ''; then the last cursor
-- before.
local kept, most, keys_most = ARGV[2], ARGV[3], ARGV[4] + 0
local key, side, seq = ARGV[5], ARGV[7], ARGV[8]

local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local before = last[1] and last[1][1] or '0-0'

local held = redis.call('HMGET', KEYS[1], 'a', 'x', 'q', 'r')
if side == '' and (not held[1] or held[2]) then return {'no_session', '', before} end
-- Before its seq: whoever repeats a message that is there, because they were cut off, has to be told that it is there.
if key ~= '' and redis.call('ZSCORE', KEYS[3], key) then return {'duplicate', '', before} end
local seen = side == 'u' and held[3] or side == 'a' and held[4]
if seq ~= '' and (seq + 0 < 0 or seen and seq + 0 <= seen + 0) then return {'replayed', '', before} end

if key ~= '' then
  redis.call('ZADD', KEYS[3], whole(now), key)
  redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -keys_most - 1)
  redis.call('PEXPIRE', KEYS[3], kept)
end
local cursor = redis.call('XADD', KEYS[2], 'MAXLEN', most, '*', 'm', ARGV[6])
redis.call('PEXPIRE', KEYS[2], kept)
return {'stored', cursor, before}
