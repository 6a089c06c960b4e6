-- Remove sessions from the count of paused ones when their pause is too old.
-- KEYS[1]  {shard}:paused    sorted set: session id by last frame, ms
-- KEYS[2]  {shard}:counts    hash: how many sessions are armed (a:<policy>) and paused (p:<policy>)
-- KEYS[3…] {shard}:s:<id>    hash, one key a session (fields: see note_activity)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long a pause counts after its last frame, ms: less than sessions are kept
-- ARGV[3…] one a session: its id
-- Returns how many were removed.
local deleted = 0
for number = 1, #KEYS - 2 do
  local key, id = KEYS[2 + number], ARGV[2 + number]
  local last = redis.call('ZSCORE', KEYS[1], id)
  if last and last + 0 <= now - ARGV[2] then
    redis.call('ZREM', KEYS[1], id)
    deleted = deleted + 1
    local was = redis.call('HGET', key, 'w')
    if was and was:sub(1, 2) == 'p:' then
      recount(KEYS[2], was, false)
      redis.call('HDEL', key, 'w')
    end
  end
end
return deleted
