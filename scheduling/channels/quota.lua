-- Take up to `wanted` slots for one target, within all its limits, by the clock of this server.
--
-- KEYS[1]  at:quota:{<hash of target key>}:log    list of grant instants (µs), oldest first (quota_list.lua)
-- KEYS[2]  at:quota:{<hash of target key>}:mute   present while the vendor has muted the target; its TTL is the rest
-- KEYS[3]  at:quota:{<hash of target key>}:used   hash of granted messages: "day:<start in µs>", "month:<start>", and
--                                                 "part:<start>" for a quarter of an hour
-- ARGV[1]  wanted (≥ 0)
-- ARGV[2]  number of windows, followed by limit, window in µs for each
-- ARGV[…]  number of periods, followed for each by "day" or "month", limit, number of instants, and these: the starts
--          of the periods around now and the end of the last one, in µs
--
-- Returns {granted, microseconds until the next slot is free, instant of the grants}. One slot a message, never given back.
-- A window holds where the grant `limit` places back is at least a window old.

local wanted = tonumber(ARGV[1])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local PART, MINUTE, DAY_MS = 900000000, 60000000, 86400000

local muted = redis.call('PTTL', KEYS[2])
if muted > 0 then
  return {0, muted * 1000, 0}
end

local windows, keep, longest = read_windows(3, tonumber(ARGV[2]))
local place = 3 + 2 * #windows
local periods, room = {}, wanted
for _ = 1, tonumber(ARGV[place]) do
  local limit, count = tonumber(ARGV[place + 2]), tonumber(ARGV[place + 3])
  for i = place + 4, place + 2 + count do
    local ends = tonumber(ARGV[i + 1])
    if tonumber(ARGV[i]) <= now and now < ends then
      local field = ARGV[place + 1] .. ':' .. ARGV[i]
      local left = limit - tonumber(redis.call('HGET', KEYS[3], field) or 0)
      table.insert(periods, {kind = ARGV[place + 1], field = field, left = left, ends = ends})
      room = math.min(room, left)
    end
  end
  place = place + 3 + count
end
if #periods < tonumber(ARGV[3 + 2 * #windows]) then
  return {0, MINUTE, 0}  -- the caller's clock is wrong by more than an hour
end

local log = redis.call('LRANGE', KEYS[1], -keep, -1)
for i = 1, #log do
  log[i] = tonumber(log[i])
end

local function free_at(granted)
  local at = free_after(log, windows, now)
  for _, period in ipairs(periods) do
    if granted >= period.left then
      at = math.max(at, period.ends)
    end
  end
  return at
end

-- A clock that was set back must not shorten a window: the log never runs backwards.
local logged_at = log[#log] or 0
local grant_at = math.max(now, logged_at)
local granted = {}
while #granted < room and free_at(#granted) <= now do
  table.insert(log, grant_at)
  table.insert(granted, string.format('%.0f', grant_at))
end

local function count_granted(kind, field)
  if redis.call('HINCRBY', KEYS[3], field, #granted) == #granted then
    for _, other in ipairs(redis.call('HKEYS', KEYS[3])) do
      if other ~= field and string.match(other, '^%a+') == kind then
        redis.call('HDEL', KEYS[3], other)
      end
    end
  end
end

if #granted > 0 then
  append_instants(KEYS[1], granted, now, keep, find_span(KEYS[1], logged_at, longest))
  local last = 0
  for _, period in ipairs(periods) do
    count_granted(period.kind, period.field)
    last = math.max(last, period.ends)
  end
  if last > 0 then
    count_granted('part', string.format('part:%.0f', math.floor(now / PART) * PART))
    -- Another row with this target may have a longer period.
    redis.call('PEXPIREAT', KEYS[3], math.max(math.ceil(last / 1000) + DAY_MS, redis.call('PEXPIRETIME', KEYS[3])))
  end
end

return {#granted, free_at(#granted) - now, string.format('%.0f', grant_at)}
