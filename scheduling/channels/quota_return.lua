-- Give reserved slots of one target and priority back. `quota_plan.lua` gives them to the next touches.
--
-- KEYS[1]  at:quota:{<hash of target key>}:free:N  sorted set: ids of touches by the instant (µs) of their slot
-- ARGV     for each touch: its id, and the µs until its slot

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local last = math.max(redis.call('PTTL', KEYS[1]), 0)
for i = 1, #ARGV, 2 do
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[i + 1])), ARGV[i])
  last = math.max(last, math.ceil(tonumber(ARGV[i + 1]) / 1000) + 1)
end
redis.call('PEXPIRE', KEYS[1], last)
return {}
