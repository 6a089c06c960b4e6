-- Prefix of every script of the store. Only the server's clock decides.
-- ARGV[1]  added to the server's clock, µs; 0 except in tests
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2] + ARGV[1]
local now = math.floor(now_us / 1000) -- ms
math.randomseed(time[1] % 1000 * 1000000 + time[2])

-- Without policies no timer may start: the store pushes the policies and calls again.
local NO_POLICIES = {err = 'NOPOLICIES the policies are not there'}

local function whole(number)
  return string.format('%.0f', number)
end

-- {tags = {tag = {threshold ms, jitter ms, grace ms, max guide messages, growth}},
--  campaigns = {{from ms, to ms, threshold ms}}}
local function read_policies(key)
  local body = redis.call('HGET', key, 'body')
  return body and cjson.decode(body)
end

local function policy_of(policies, tag)
  return policies.tags[tag] or policies.tags.default
end

-- For how long after a guide message the user's signs are recorded, ms; and how many unread signs a shard keeps.
local ANSWERED_WITHIN, MOST_SIGNS = 600000, 10000

-- ms; well below the time for which sessions are kept.
local LONGEST = 46800000

-- Return the threshold in ms after a number of guide messages. Of the active campaigns, the latest to start applies.
local function silence_threshold(policies, tag, nudges)
  local policy = policy_of(policies, tag)
  local threshold = policy[1]
  for _, campaign in ipairs(policies.campaigns) do
    if campaign[1] <= now and now < campaign[2] then threshold = campaign[3] end
  end
  return math.min(LONGEST, math.floor(threshold * policy[5] ^ nudges + math.random() * policy[2]))
end

-- Return the tag under which sessions are counted. The number of names is bounded by the policies.
local function counted_as(policies, tag)
  return policies.tags[tag] and tag or 'default'
end

-- Return how a session is counted: a:<tag> armed, p:<tag> paused, false for neither. The field w stores it only where
-- it differs from a: and the session's own tag, to save memory.
local function counted_before(written, due, tag)
  return written or (due > 0 and 'a:' .. (tag or 'default'))
end

-- Move the count of one session from `was` to `as`.
local function recount(counts, was, as)
  if was and redis.call('HINCRBY', counts, was, -1) < 1 then redis.call('HDEL', counts, was) end
  if as then redis.call('HINCRBY', counts, as, 1) end
end

-- Return the next arming. Each arming is unique and identifies its silence. It increases even if the clock goes back.
local function next_arming(armed_at)
  return math.max((tonumber(armed_at) or 0) + 1, now_us)
end

-- Lists of silences in one field: entries that start with an arming and a colon and end with a newline (see still_silent,
-- note_sending). They are short: an action of the user empties them, and a policy limits the messages until then.
local function entry_of(list, armed_at)
  return list and ('\n' .. list):match('\n(' .. armed_at .. ':[^\n]*)\n')
end

local function without(list, armed_at)
  return (('\n' .. (list or '')):gsub('\n' .. armed_at .. ':[^\n]*\n', '\n'):sub(2))
end

local function size_of(list)
  return list and select(2, list:gsub('\n', '')) or 0
end

-- Number of remembered epochs of a side's counter. A late frame of an earlier epoch must not restart the counter.
local MOST_EPOCHS = 4

-- Check the order of one side's frames.
--   word    a seq, or seq@epoch
--   last    the last seq that counted, or false
--   epochs  the epochs of this side, each followed by a newline, the newest first, or false
-- Returns the seq and, for a new epoch, the updated epochs; false for a frame that arrives too late.
local function next_in_order(word, last, epochs)
  local at = word:find('@', 1, true)
  local seq = at and word:sub(1, at - 1) or word
  if at then
    local epoch, known = word:sub(at + 1) .. '\n', epochs or ''
    if known:sub(1, #epoch) ~= epoch then
      if ('\n' .. known):find('\n' .. epoch, 1, true) then return false end
      local count = 1
      for former in known:gmatch('[^\n]*\n') do
        if count < MOST_EPOCHS then epoch, count = epoch .. former, count + 1 end
      end
      return seq, epoch
    end
  end
  if last and seq + 0 <= last + 0 then return false end
  return seq
end

-- Return the lowest score of these sorted sets, -1 where they are empty.
local function first_of(...)
  local first = -1
  for _, key in ipairs({...}) do
    local found = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if found[2] and (first == -1 or found[2] + 0 < first) then first = found[2] + 0 end
  end
  return first
end
