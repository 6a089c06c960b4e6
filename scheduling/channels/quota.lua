-- Take up to `wanted` slots for one target, at most `limit` in any `window`, by the clock of this server.
--
-- KEYS[1]  at:quota:{<hash of target key>}:log    list of grant instants (µs), oldest first, at most the largest limit
-- KEYS[2]  at:quota:{<hash of target key>}:mute   present while the vendor has muted the target; its TTL is the rest
-- ARGV[1]  wanted (≥ 0)
-- ARGV[2…] limit, window in µs, limit, window in µs …
--
-- Returns {granted, microseconds until the next slot is free}. One slot a message, never given back.
-- A limit holds where the grant `limit` places back is at least a window old.

local wanted = tonumber(ARGV[1])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

local muted = redis.call('PTTL', KEYS[2])
if muted > 0 then
  return {0, muted * 1000}
end

local keep, longest = 0, 0
for i = 2, #ARGV, 2 do
  keep = math.max(keep, tonumber(ARGV[i]))
  longest = math.max(longest, tonumber(ARGV[i + 1]))
end

-- A clock that was set back must not shorten a window.
local newest = tonumber(redis.call('LINDEX', KEYS[1], -1) or 0)
local grant_at = math.max(now, newest)

local function free_at()
  local at = now
  for i = 2, #ARGV, 2 do
    local taken = redis.call('LINDEX', KEYS[1], -tonumber(ARGV[i]))
    if taken then
      at = math.max(at, tonumber(taken) + tonumber(ARGV[i + 1]))
    end
  end
  return at
end

local granted = 0
while granted < wanted and free_at() <= now do
  redis.call('RPUSH', KEYS[1], string.format('%.0f', grant_at))
  granted = granted + 1
end

if granted > 0 then
  redis.call('LTRIM', KEYS[1], -keep, -1)
  redis.call('PEXPIRE', KEYS[1], math.ceil((grant_at - now + longest) / 1000) + 1)
end

return {granted, free_at() - now}
