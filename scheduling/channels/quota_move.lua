-- Move a granted slot of one target to now, if that keeps within its windows, by the clock of this server.
--
-- KEYS[1]  at:quota:{<hash of target key>}:log    as in quota.lua
-- KEYS[2]  at:quota:{<hash of target key>}:mute   as in quota.lua
-- ARGV[1]  instant of the grant, as quota.lua returned it
-- ARGV[2]  number of windows, followed by limit, window in µs for each
--
-- Returns {0, new instant}, or {microseconds until the next attempt, 0}; the slot then stays where it is.
-- Days and months are not moved: a message belongs to the day of its grant.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

local muted = redis.call('PTTL', KEYS[2])
if muted > 0 then
  return {muted * 1000, 0}
end

local log = redis.call('LRANGE', KEYS[1], 0, -1)
local last = tonumber(log[#log] or 0)
for i = #log, 1, -1 do
  if log[i] == ARGV[1] then
    table.remove(log, i)
    break
  end
end

local windows, keep, longest = read_windows(3, tonumber(ARGV[2]))
local free_at = free_after(log, windows, now)
if free_at > now then
  return {free_at - now, 0}
end

local moved_to = string.format('%.0f', math.max(now, last))
local span = find_span(KEYS[1], last, longest)
redis.call('LREM', KEYS[1], -1, ARGV[1])
append_instants(KEYS[1], {moved_to}, now, keep, span)
return {0, moved_to}
