-- Lease a slice of a key's budget for the present minute, by the clock of this server.
--
-- KEYS[1]  at:rate:{<id of the API key>}:<meter>   hash {minute, used}; lives for two minutes
-- ARGV[1]  limit a minute
-- ARGV[2]  wanted (≥ 1)
--
-- Returns {granted (0 … wanted), milliseconds until the minute ends}. What is granted is never given back; it counts
-- in this minute only.

local time = redis.call('TIME')
local seconds = tonumber(time[1])
local minute = math.floor(seconds / 60)
local left = (minute + 1) * 60000 - seconds * 1000 - math.floor(tonumber(time[2]) / 1000)

local row = redis.call('HMGET', KEYS[1], 'minute', 'used')
local used = 0
if row[1] and tonumber(row[1]) == minute then
  used = tonumber(row[2])
end

local granted = math.max(0, math.min(tonumber(ARGV[2]), tonumber(ARGV[1]) - used))
if granted > 0 then
  redis.call('HSET', KEYS[1], 'minute', minute, 'used', used + granted)
  redis.call('EXPIRE', KEYS[1], 120)
end
return {granted, left}
