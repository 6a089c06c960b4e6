-- Functions for the lists of instants that the channel rows with one target share. `quota.py` puts them before scripts.
--
-- Each row has its own limits. A list holds what any of them needs: the instants within the longest window of the rows
-- that appended to it, at most as many as a limit may be. It expires that window after its last instant: its expiry
-- tells the window to the next call. The list of a single row holds no more instants than the row's largest limit.

local LARGEST_QUOTA = 1000  -- as in options.py

-- Read `count` windows from ARGV[first] on: limit, window in µs. Return them, the largest limit and the longest window.
local function read_windows(first, count)
  local windows, keep, longest = {}, 1, 0
  for i = first, first + 2 * count - 1, 2 do
    local limit, window = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
    table.insert(windows, {limit, window})
    keep, longest = math.max(keep, limit), math.max(longest, window)
  end
  return windows, keep, longest
end

-- Return the first instant from `at` on with a place in each window after the instants `taken`, which ascend.
local function free_after(taken, windows, at)
  for _, window in ipairs(windows) do
    local oldest = taken[#taken - window[1] + 1]
    if oldest then
      at = math.max(at, tonumber(oldest) + window[2])
    end
  end
  return at
end

-- Return the longest window (ms) of a list and of a row whose longest is `longest` (µs). `last` is the last instant of the
-- list (µs; 0: it has none).
local function find_span(key, last, longest)
  return math.max(math.ceil(longest / 1000), redis.call('PEXPIRETIME', key) - math.ceil(last / 1000) - 1)
end

-- Append instants (texts, ascending). Drop old ones that no row needs: not among the last `keep`, and at `at` (µs) older
-- than `span` (ms).
local function append_instants(key, instants, at, keep, span)
  local size = redis.call('RPUSH', key, unpack(instants))
  local dropped = math.max(size - LARGEST_QUOTA, 0)
  local most = math.min(dropped + 2 * #instants, size - keep)
  if dropped < most then
    for _, instant in ipairs(redis.call('LRANGE', key, dropped, most - 1)) do
      if tonumber(instant) > at - span * 1000 then
        break
      end
      dropped = dropped + 1
    end
  end
  if dropped > 0 then
    redis.call('LTRIM', key, dropped, -1)
  end
  redis.call('PEXPIREAT', key, math.ceil(tonumber(instants[#instants]) / 1000) + span + 1)
end

