-- How many sessions a shard has. Whoever looks also forgets the pauses that nobody ends any more.
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:inflight  sorted set: session id by end of lease, ms
-- KEYS[3]  {shard}:paused    sorted set: session id by last frame, ms
-- KEYS[4]  {shard}:counts    hash: how many sessions are armed (a:<tag>) and paused (p:<tag>)
-- KEYS[5]  {shard}:s:        what the sessions' hashes begin with (fields: see note_activity)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long a pause counts after its last frame, ms: less than sessions are kept
-- Returns the time, ms; how many are armed, in flight and paused; the first deadline, ms, or -1; and the counts, each
-- name followed by its number.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - ARGV[2], 'LIMIT', 0, 100)) do
  redis.call('ZREM', KEYS[3], id)
  local was = redis.call('HGET', KEYS[5] .. id, 'w')
  if was and was:sub(1, 2) == 'p:' then
    recount(KEYS[4], was, false)
    redis.call('HDEL', KEYS[5] .. id, 'w')
  end
end

local armed, in_flight = redis.call('ZCARD', KEYS[1]), redis.call('ZCARD', KEYS[2])
local paused = redis.call('ZCARD', KEYS[3])
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
local answer = {now, armed, in_flight, paused, first[2] and first[2] + 0 or -1}
local counts = redis.call('HGETALL', KEYS[4])
for number = 1, #counts, 2 do
  -- A session that vanished without a word (only where memory ran out, or nobody watched for hours) is not counted off.
  -- Where a shard is empty that is put right.
  local is_armed = counts[number]:sub(1, 2) == 'a:'
  if (is_armed and armed + in_flight or paused) == 0 then
    redis.call('HDEL', KEYS[4], counts[number])
  else
    answer[#answer + 1] = counts[number]
    answer[#answer + 1] = counts[number + 1] + 0
  end
end
return answer
