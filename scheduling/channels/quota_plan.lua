-- Give each touch of one target a slot: now, or a reserved instant of its own. By the clock of this server.
--
-- KEYS[1]  at:quota:{<hash of target key>}:log     grants of quota.lua: instants (µs), oldest first
-- KEYS[2]  at:quota:{<hash of target key>}:mute    present while the vendor has muted the target
-- KEYS[3…] at:quota:{<hash of target key>}:plan:N  reserved instants (µs) by priority, the most important first. The
--                                                  last key is the priority of these touches. Each list is ascending
--                                                  and holds at most as many instants as the largest limit.
-- ARGV[1]  µs: a touch whose reserved slot has come goes now if the log has a slot within this time
-- ARGV[2]  number of touches that the caller has let go and that have no grant yet
-- ARGV[3]  number of quotas, followed by limit, window in µs for each
-- ARGV[…]  for each touch: longest useful wait in µs, 1 if its reserved slot has come or else 0
--
-- Returns for each touch the µs to wait, 0 to go now, -1 if its slot would come too late; that slot is not taken.
-- A slot is free where neither the log nor the plans of the same or a more important priority need it.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local opens = now + math.max(redis.call('PTTL', KEYS[2]), 0) * 1000
local near, in_transit = tonumber(ARGV[1]), tonumber(ARGV[2])

local quotas, keep, longest = {}, 0, 0
local first = 4 + 2 * tonumber(ARGV[3])
for i = 4, first - 1, 2 do
  local limit, window = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
  table.insert(quotas, {limit, window})
  keep, longest = math.max(keep, limit), math.max(longest, window)
end

local function read(key)
  local instants = redis.call('LRANGE', key, -keep, -1)
  for i = 1, #instants do
    instants[i] = tonumber(instants[i])
  end
  return instants
end

local function free_after(taken)
  local at = opens
  for _, quota in ipairs(quotas) do
    local oldest = taken[#taken - quota[1] + 1]
    if oldest then
      at = math.max(at, oldest + quota[2])
    end
  end
  return at
end

local log = read(KEYS[1])
local logged_at = log[#log] or 0
local planned = {}
for i = 3, #KEYS do
  for _, at in ipairs(read(KEYS[i])) do
    table.insert(planned, at)
  end
end
table.sort(planned)

-- Touches whose slot has come go first, after those in transit. `granted` is the log as it will be then.
local granted, let_go = {unpack(log)}, {}
local function grant_next()
  table.insert(granted, math.max(free_after(granted), granted[#granted] or 0))
end
for _ = 1, math.min(in_transit, keep) do
  grant_next()
end
for i = first, #ARGV, 2 do
  if ARGV[i + 1] == '1' and free_after(granted) - now <= near then
    grant_next()
    let_go[i] = true
  end
end

-- A reserved instant up to the last grant counts in the log, or its touch was late. Later ones count beside the log, and
-- stand for the touches that go now.
local used, come = {unpack(log)}, 0
for _, at in ipairs(planned) do
  if at > logged_at then
    table.insert(used, at)
    come = come + (at <= now and 1 or 0)
  end
end
for i = #log + come + 1, #granted do
  table.insert(used, granted[i])
end
table.sort(used)

local waits, reserved = {}, {}
for i = first, #ARGV, 2 do
  local wait = 0
  if not let_go[i] then
    local slot = math.max(free_after(used), free_after(planned), planned[#planned] or 0)
    wait = slot - now
    if wait > tonumber(ARGV[i]) then
      wait = -1
    else
      table.insert(used, slot)
      table.insert(planned, slot)
      table.insert(reserved, string.format('%.0f', slot))
    end
  end
  table.insert(waits, wait)
end

local plan = KEYS[#KEYS]
if #reserved > 0 then
  redis.call('RPUSH', plan, unpack(reserved))
  redis.call('LTRIM', plan, -keep, -1)
  redis.call('PEXPIRE', plan, math.ceil((planned[#planned] - now + longest) / 1000) + 1)
end
return waits
