-- Count the sessions of a shard, and find pauses that are too old (see delete_pauses).
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:inflight  sorted set: session id by end of lease, ms
-- KEYS[3]  {shard}:paused    sorted set: session id by last frame, ms
-- KEYS[4]  {shard}:counts    hash: how many sessions are armed (a:<policy>) and paused (p:<policy>)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long a pause counts after its last frame, ms: less than sessions are kept
-- Returns the time, ms; how many are armed, in flight and paused; the first deadline, ms, or -1; the ids of at most 100
-- sessions whose pause is too old; and the counts, each name followed by its number.
local armed, in_flight = redis.call('ZCARD', KEYS[1]), redis.call('ZCARD', KEYS[2])
local paused = redis.call('ZCARD', KEYS[3])
local over = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - ARGV[2], 'LIMIT', 0, 100)
local answer = {now, armed, in_flight, paused, first_of(KEYS[1]), over}
local counts = redis.call('HGETALL', KEYS[4])
for number = 1, #counts, 2 do
  -- A session that Redis evicted, or that expired while no watcher ran for hours, is still in the counts.
  -- An empty shard resets its counts.
  local is_armed = counts[number]:sub(1, 2) == 'a:'
  if (is_armed and armed + in_flight or paused) == 0 then
    redis.call('HDEL', KEYS[4], counts[number])
  else
    answer[#answer + 1] = counts[number]
    answer[#answer + 1] = counts[number + 1] + 0
  end
end
return answer
