-- Return claims before their lease ends.
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:inflight  sorted set: session id by end of lease, ms
-- KEYS[3…] {shard}:s:<id>    hash, one key a claim (fields: see note_activity)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2…] two a claim: session id, arming
-- Returns how many were still in flight under that arming.
local released = 0
for number = 0, #KEYS - 3 do
  local id, armed_at = ARGV[2 + number * 2], ARGV[3 + number * 2]
  local held = redis.call('HMGET', KEYS[3 + number], 'a', 'd')
  if held[1] == armed_at and redis.call('ZREM', KEYS[2], id) == 1 then
    redis.call('ZADD', KEYS[1], held[2], id)
    released = released + 1
  end
end
return released
