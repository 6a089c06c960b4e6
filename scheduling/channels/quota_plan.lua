-- Give each touch of one target a slot: now, or a reserved instant of its own. By the clock of this server.
--
-- KEYS[1]  at:quota:{<hash of target key>}:log      grants of quota.lua: instants (µs), oldest first
-- KEYS[2]  at:quota:{<hash of target key>}:mute     present while the vendor has muted the target
-- KEYS[3]  at:quota:{<hash of target key>}:used     counts of quota.lua by day, month and quarter of an hour
-- KEYS[…]  at:quota:{<hash of target key>}:plan:N   reserved instants (µs) by priority, the most important first. The
--                                                   last of these keys is the priority of these touches. Each list is
--                                                   ascending (quota_list.lua).
-- KEYS[…]  at:quota:{<hash of target key>}:late:N   likewise: instants of touches whose reserved slot came without room
-- KEYS[…]  at:quota:{<hash of target key>}:ahead:N  hashes by the same priorities, for targets with a limit a day or
--                                                   month: reserved slots by start of a quarter of an hour (µs)
-- KEYS[…]  at:quota:{<hash of target key>}:free:N   sorted sets by the same priorities: slots of cancelled touches, by
--                                                   their instant (µs). They still count in the plan.
-- ARGV[1]  µs: a touch whose reserved slot has come goes now if the log has a slot within this time
-- ARGV[2]  number of touches that the caller has let go and that have no grant yet
-- ARGV[3]  number of windows and periods, as in quota.lua. The periods reach to the latest useful slot.
-- ARGV[…]  for each touch: longest useful wait in µs, 1 if its reserved slot has come or else 0
--
-- Returns for each touch the µs to wait, 0 to go now, -1 if its slot would come too late; that slot is not taken.
-- A slot is free where neither the log nor the plans of the same or a more important priority need it. A touch whose
-- slot came without room does not go to the end of the plan of its own priority: it takes the next slot, and the
-- touch that was to have it comes without room in turn.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local opens = now + math.max(redis.call('PTTL', KEYS[2]), 0) * 1000
local near, in_transit = tonumber(ARGV[1]), tonumber(ARGV[2])
local PART, HOUR_MS = 900000000, 3600000
local part_now = math.floor(now / PART) * PART
local levels = (#KEYS - 3) / 4
local plan, late, own_ahead = KEYS[3 + levels], KEYS[3 + 2 * levels], KEYS[3 + 3 * levels]

local windows, keep, longest = read_windows(4, tonumber(ARGV[3]))
local first = 4 + 2 * #windows
local kinds = {}
local count_of_kinds = tonumber(ARGV[first])
first = first + 1
for _ = 1, count_of_kinds do
  local kind = {name = ARGV[first], limit = tonumber(ARGV[first + 1]), names = {}, starts = {}, needed = {}}
  for i = first + 3, first + 2 + tonumber(ARGV[first + 2]) do
    table.insert(kind.names, ARGV[i])
    table.insert(kind.starts, tonumber(ARGV[i]))
  end
  table.insert(kinds, kind)
  first = first + 3 + #kind.starts
end

local function read(key)
  local instants = redis.call('LRANGE', key, -keep, -1)
  for i = 1, #instants do
    instants[i] = tonumber(instants[i])
  end
  return instants
end

-- Counts by quarter of an hour. A quarter that has passed is forgotten: slots that nobody used are free again.
local used_counts, ahead, passed = {}, {}, {}
if #kinds > 0 then
  local found = redis.call('HGETALL', KEYS[3])
  for i = 1, #found, 2 do
    used_counts[found[i]] = tonumber(found[i + 1])
  end
  for level = 1, levels do
    found = redis.call('HGETALL', KEYS[3 + 2 * levels + level])
    for i = 1, #found, 2 do
      local part = tonumber(found[i])
      if part >= part_now then
        ahead[part] = (ahead[part] or 0) + tonumber(found[i + 1])
      elseif level == levels then
        table.insert(passed, found[i])
      end
    end
  end
end

-- What a period needs: grants before this quarter, the greater of grants and plans in it, and plans after it.
local function needed(kind, i)
  if not kind.needed[i] then
    local total, starts, ends = 0, kind.starts[i], kind.starts[i + 1]
    for part, count in pairs(ahead) do
      if part >= starts and part < ends then
        total = total + count
      end
    end
    if starts <= now and now < ends then
      local granted = used_counts[string.format('part:%.0f', part_now)] or 0
      total = total + (used_counts[kind.name .. ':' .. kind.names[i]] or 0) - math.min(granted, ahead[part_now] or 0)
    end
    kind.needed[i] = total
  end
  return kind.needed[i]
end

local function find_period(kind, at)
  for i = 1, #kind.starts - 1 do
    if kind.starts[i] <= at and at < kind.starts[i + 1] then
      return i
    end
  end
end

-- The first instant from `at` on whose periods have room; nil: none is known.
local function free_period(at)
  repeat
    local moved = false
    for _, kind in ipairs(kinds) do
      local i = find_period(kind, at)
      if not i then
        return nil
      end
      if needed(kind, i) >= kind.limit then
        at, moved = kind.starts[i + 1], true
      end
    end
  until not moved
  return at
end

local function has_grant_today(count)
  for _, kind in ipairs(kinds) do
    local i = find_period(kind, now)
    if not i or (used_counts[kind.name .. ':' .. kind.names[i]] or 0) + count >= kind.limit then
      return false
    end
  end
  return true
end

local log = read(KEYS[1])
local logged_at = log[#log] or 0
local planned, before_late = {}, {}
for i = 4, 3 + 2 * levels do
  for _, at in ipairs(read(KEYS[i])) do
    table.insert(planned, at)
    if KEYS[i] ~= plan then
      table.insert(before_late, at)
    end
  end
end
table.sort(planned)
table.sort(before_late)

-- Touches whose slot has come go first, after those in transit. `granted` is the log as it will be then.
local granted, let_go, going = {unpack(log)}, {}, in_transit
local function grant_next()
  table.insert(granted, math.max(free_after(granted, windows, opens), granted[#granted] or 0))
end
for _ = 1, math.min(in_transit, keep) do
  grant_next()
end
for i = first, #ARGV, 2 do
  if ARGV[i + 1] == '1' and free_after(granted, windows, opens) - now <= near and has_grant_today(going) then
    grant_next()
    let_go[i], going = true, going + 1
  end
end

-- Return the log with these instants. One up to the last grant counts in the log, or its touch was late. Later ones count
-- beside the log, and stand for the touches that go now.
local function add_to_log(instants)
  local sum, come = {unpack(log)}, 0
  for _, at in ipairs(instants) do
    if at > logged_at then
      table.insert(sum, at)
      come = come + (at <= now and 1 or 0)
    end
  end
  for i = #log + come + 1, #granted do
    table.insert(sum, granted[i])
  end
  table.sort(sum)
  return sum
end

local function reserve(slot)
  for _, kind in ipairs(kinds) do
    local i = find_period(kind, slot)
    kind.needed[i] = kind.needed[i] + 1
  end
  if #kinds > 0 then
    redis.call('HINCRBY', own_ahead, string.format('%.0f', math.floor(slot / PART) * PART), 1)
  end
end

-- Slots that cancelled touches gave back, the first ones first.
local free, next_free = {}, 1
for i = 4 + 3 * levels, 3 + 4 * levels do
  redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', string.format('%.0f', now))
  local found = redis.call(
    'ZRANGEBYSCORE', KEYS[i], string.format('%.0f', opens), '+inf', 'WITHSCORES', 'LIMIT', 0, (#ARGV - first + 1) / 2
  )
  for j = 1, #found, 2 do
    table.insert(free, {at = tonumber(found[j + 1]), id = found[j], key = KEYS[i]})
  end
end
table.sort(free, function(one, other) return one.at < other.at end)

-- Reserve a slot for each touch whose slot has come, or for each of the others, and append them to `list`. None lies
-- before the last of `bounds`, which is ascending.
local waits = {}
local function reserve_slots(has_come, list, bounds)
  local used, reserved = add_to_log(bounds), {}
  for i = first, #ARGV, 2 do
    if not let_go[i] and (ARGV[i + 1] == '1') == has_come then
      local free_at = math.max(free_after(used, windows, opens), free_after(bounds, windows, opens))
      local slot = free_period(math.max(free_at, bounds[#bounds] or 0))
      local given_back = free[next_free]
      if given_back and (not slot or given_back.at < slot) then
        slot = given_back.at
      else
        given_back = nil
      end
      if not slot or slot - now > tonumber(ARGV[i]) then
        waits[i] = -1
      elseif given_back then
        waits[i] = slot - now
        redis.call('ZREM', given_back.key, given_back.id)
        next_free = next_free + 1
      else
        waits[i] = slot - now
        reserve(slot)
        table.insert(used, slot)
        table.insert(bounds, slot)
        table.insert(reserved, slot)
      end
    end
  end
  if #reserved > 0 then
    local span, texts = find_span(list, tonumber(redis.call('LINDEX', list, -1) or 0), longest), {}
    for i, slot in ipairs(reserved) do
      texts[i] = string.format('%.0f', slot)
    end
    append_instants(list, texts, reserved[#reserved], keep, span)
    if #kinds > 0 then
      local ends = math.ceil((reserved[#reserved] - now) / 1000) + HOUR_MS
      redis.call('PEXPIRE', own_ahead, math.max(ends, redis.call('PTTL', own_ahead)))
    end
  end
  return reserved
end

for _, slot in ipairs(reserve_slots(true, late, before_late)) do
  table.insert(planned, slot)
end
table.sort(planned)
reserve_slots(false, plan, planned)

if #passed > 0 then
  redis.call('HDEL', own_ahead, unpack(passed))
end

local replies = {}
for i = first, #ARGV, 2 do
  table.insert(replies, waits[i] or 0)
end
return replies
