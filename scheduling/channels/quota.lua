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

local log = redis.call('LRANGE', KEYS[1], -keep, -1)
for i = 1, #log do
  log[i] = tonumber(log[i])
end

local function free_at()
  local at = now
  for i = 2, #ARGV, 2 do
    local taken = log[#log - tonumber(ARGV[i]) + 1]
    if taken then
      at = math.max(at, taken + tonumber(ARGV[i + 1]))
    end
  end
  return at
end

-- A clock that was set back must not shorten a window: the log never runs backwards.
local grant_at = math.max(now, log[#log] or 0)
local granted = {}
while #granted < wanted and free_at() <= now do
  table.insert(log, grant_at)
  table.insert(granted, string.format('%.0f', grant_at))
end

if #granted > 0 then
  redis.call('RPUSH', KEYS[1], unpack(granted))
  redis.call('LTRIM', KEYS[1], -keep, -1)
  redis.call('PEXPIRE', KEYS[1], math.ceil((grant_at - now + longest) / 1000) + 1)
end

return {#granted, free_at() - now}
