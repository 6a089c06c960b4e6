-- In front of every script of the store. Only the server's clock decides.
-- ARGV[1]  what is added to the server's clock, in µs: 0, but in tests
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2] + ARGV[1]
local now = math.floor(now_us / 1000) -- ms
math.randomseed(time[1] % 1000 * 1000000 + time[2])

-- Without the policies nothing may be armed: the store pushes them and calls again.
local NO_POLICIES = {err = 'NOPOLICIES the policies are not there'}

local function whole(number)
  return string.format('%.0f', number)
end

-- {tags = {tag = {threshold ms, jitter ms, grace ms, most nudges, growth}}, campaigns = {{from ms, to ms, threshold ms}}}
local function read_policies(key)
  local body = redis.call('HGET', key, 'body')
  return body and cjson.decode(body)
end

local function policy_of(policies, tag)
  return policies.tags[tag] or policies.tags.default
end

-- Until when after a guide message the user's signs are noted, ms; and how many a shard keeps until they are read.
local ANSWERED_WITHIN, MOST_SIGNS = 600000, 10000

-- Well below the time for which sessions are kept.
local LONGEST = 46800000

-- How many ms of silence are allowed after so many nudges. Of the campaigns that run, the latest to begin holds.
local function patience(policies, tag, nudges)
  local policy = policy_of(policies, tag)
  local threshold = policy[1]
  for _, campaign in ipairs(policies.campaigns) do
    if campaign[1] <= now and now < campaign[2] then threshold = campaign[3] end
  end
  return math.min(LONGEST, math.floor(threshold * policy[5] ^ nudges + math.random() * policy[2]))
end

-- What sessions of this tag are counted under: there are no more names than policies.
local function counted_as(policies, tag)
  return policies.tags[tag] and tag or 'default'
end

-- What a session is counted as: a:<tag> armed, p:<tag> paused, false for neither. It is written down (w) only where it
-- is not a: and the session's own tag, as it is for most.
local function counted_before(written, due, tag)
  return written or (due > 0 and 'a:' .. (tag or 'default'))
end

-- A session that was counted as `was` is counted as `as` now.
local function recount(counts, was, as)
  if was and redis.call('HINCRBY', counts, was, -1) < 1 then redis.call('HDEL', counts, was) end
  if as then redis.call('HINCRBY', counts, as, 1) end
end

-- Each arming has its own instant, which names its silence: it grows even if the server's clock goes back.
local function next_arming(armed_at)
  return math.max((tonumber(armed_at) or 0) + 1, now_us)
end

-- How many epochs of a side's counter are remembered: a late frame of an earlier one must not start it again.
local MOST_EPOCHS = 4

-- The order of one side's frames.
--   word    a seq, or seq@epoch
--   last    the last seq that counted, or false
--   epochs  the epochs of this side, each followed by a newline, the newest first, or false
-- Returns the seq and, where the epoch is new, the epochs that are known now; false for a frame that comes too late.
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

-- The lowest score of these sorted sets, -1 where they are empty.
local function first_of(...)
  local first = -1
  for _, key in ipairs({...}) do
    local found = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if found[2] and (first == -1 or found[2] + 0 < first) then first = found[2] + 0 end
  end
  return first
end
