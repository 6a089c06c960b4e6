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

-- {policies = {{key =, version =, tags =, threshold = ms, jitter = ms, grace = ms, grace_for =, most = guide messages,
--    growth =, after =, hours =}, …}, campaigns = {{from ms, to ms, threshold ms}, …}}
--   policies  those with most tags first, of equal ones the shortest threshold; the last one has no tags
--   after     whose message starts the timer: any; agent (the customer is silent); customer (no agent answers)
--   hours     the spans in which time counts: {from ms, to ms, from ms, to ms …}; empty: always
local function read_policies(key)
  local body = redis.call('HGET', key, 'body')
  return body and cjson.decode(body)
end

local chosen = {}

-- Return the guide policy and the answer policy of a session, false for one that it has not. Of each kind it is the first
-- whose tags the session all has. Policies with `after: customer` are answer policies. `tags` are separated by newlines.
local function policies_of(policies, tags)
  local found = chosen[tags]
  if not found then
    found = {false, false}
    local own = '\n' .. tags .. '\n'
    for _, policy in ipairs(policies.policies) do
      local place = policy.after == 'customer' and 2 or 1
      local fits = not found[place]
      for _, tag in ipairs(policy.tags) do fits = fits and own:find('\n' .. tag .. '\n', 1, true) end
      if fits then found[place] = policy end
    end
    chosen[tags] = found
  end
  return found[1], found[2]
end

-- Return the key of the policy that counts the guide messages and pauses of a session with these policies.
local function counting_policy(guide, answer)
  return (guide or answer).key
end

-- For how long after a guide message a reaction counts, and within which it shows that the message was not needed, ms.
local ANSWERED_WITHIN, FALSE_WITHIN = 600000, 2000
local COUNTS_KEPT = 691200000 -- ms: eight days

-- Count something of a policy in the counts of the day (see `stats.read_week`). `by` is -1 to take a count back.
local function count_today(key, what, policy, by)
  by = by or 1
  if redis.call('HINCRBY', key, what .. ':' .. policy, by) == by then redis.call('PEXPIRE', key, COUNTS_KEPT) end
end

-- The mark of the last guide message (field z):
--   the arming of its silence · the time of that message, ms · the time until the user typed, ms, or '' · its fate · the
--   key of the policy that counts it
--   fate: '' sent; OPEN where a frame of the user counted it before `note_sending`; JUDGED after its message then
local OPEN, JUDGED = 'o', 'j'

local function build_mark(armed_at, at, typed, fate, policy)
  return table.concat({armed_at, at, typed, fate, policy}, ':')
end

-- Return these five, nothing without a mark.
local function read_mark(mark)
  return (mark or ''):match('^(%d+):(%d+):(%d*):(%a?):(.*)$')
end

-- ms; well below the time for which sessions are kept; `LONGEST_WAIT` in `policy.py`.
local LONGEST = 46800000

-- Return the instant, ms, at which `span` of the open hours after `from` has passed. Each closed hour is skipped.
local function after_open(hours, from, span)
  for number = 1, #hours, 2 do
    local opens, closes = math.max(from, hours[number]), hours[number + 1]
    if opens + span <= closes then return opens + span end
    if opens < closes then from, span = closes, span - (closes - opens) end
  end
  return from + span
end

-- Who wrote the last message (field i): UNKNOWN after Redis lost the session, USER, AGENT, or WAITING: the user, and the
-- timer waits for an agent.
local UNKNOWN, USER, AGENT, WAITING = '0', '1', '2', '3'

-- Return whether the guide policy's timer runs after this last writer. With an answer policy it runs only after a message
-- of the agent, because the other timer runs after the user's.
local function guide_runs(guide, answer, writer)
  return guide and writer ~= WAITING and (writer == AGENT or guide.after == 'any' and not answer)
end

-- Return the policy of a running timer. Both kinds may be retired while it runs.
local function policy_of_timer(guide, answer, writer)
  return writer == WAITING and answer or guide or answer
end

-- Return the active campaign, or nil. Of several, the latest to start applies.
local function active_campaign(policies)
  local found
  for _, campaign in ipairs(policies.campaigns) do
    if campaign[1] <= now and now < campaign[2] then found = campaign end
  end
  return found
end

-- Return the cutoff and cursor (see find_armed) of the campaign if its batches have begun, else nil.
local function applied_campaign(key, campaign)
  local applied = redis.call('HGET', key, 'applied') or ''
  local start, threshold, cutoff, cursor = applied:match('^(%d+):(%d+):(%d+):(%d*)$')
  if start == whole(campaign[1]) and threshold == whole(campaign[3]) then return cutoff, cursor end
end

-- Return the deadline of a timer that starts at `from`, after a number of guide messages. A campaign does not change the
-- time in which an agent answers.
local function deadline_after(policies, policy, nudges, from)
  local campaign = policy.after ~= 'customer' and active_campaign(policies)
  local threshold = campaign and campaign[3] or policy.threshold
  local span = math.min(LONGEST, math.floor(threshold * policy.growth ^ nudges + math.random() * policy.jitter))
  return after_open(policy.hours, from, span)
end

-- Return how long a session is kept, ms. Closed hours may make its timer longer than that.
local function lifetime(kept, deadline)
  return deadline - now > LONGEST and whole(deadline - now + kept) or kept
end

-- Return how a session is counted: a:<policy> armed, p:<policy> paused, false for neither. The field w stores it only
-- where it differs from a: and the session's own tags, to save memory.
local function counted_before(written, due, tags)
  return written or (due > 0 and 'a:' .. (tags or 'default'))
end

-- Move the count of one session from `was` to `as`.
local function recount(counts, was, as)
  if was and redis.call('HINCRBY', counts, was, -1) < 1 then redis.call('HDEL', counts, was) end
  if as then redis.call('HINCRBY', counts, as, 1) end
end

-- Number of sessions without a timer that a shard lists: a bound of memory. Those of a day at most, so that ids leave.
local MOST_IDLE, IDLE_KEPT = 256, 86400000

-- List a session whose timer stopped, or that begins without one. Those that lost their timer last stay.
local function list_idle(key, id)
  redis.call('ZADD', key, now, id)
  redis.call('ZREMRANGEBYRANK', key, 0, -MOST_IDLE - 1)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', whole(now - IDLE_KEPT))
  redis.call('PEXPIRE', key, IDLE_KEPT)
end

-- Return the next arming, at `at_us` or now. Each arming is unique and identifies its silence. It increases even if the
-- clock goes back.
local function next_arming(armed_at, at_us)
  return math.max((tonumber(armed_at) or 0) + 1, at_us or now_us)
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

-- Return the answer about a message that its inbox has, else nil. A client that repeats a stored message after a lost
-- connection must learn that it is stored, also when the session was closed since.
local function find_duplicate(inbox)
  if inbox.name ~= '' and redis.call('ZSCORE', inbox.names, inbox.name) then return {'duplicate', '', '', ''} end
end

-- Store a message. `inbox`: keys `stream` (its last messages; the entry's id is the cursor; fields m: JSON, u: the user
-- whose session it was, '' if unknown) and `names` (sorted set: names of messages by when they came, ms); the message's
-- `name`, '' for one that is never repeated, and `body`, JSON; `limits`: how long an inbox is kept after its last message,
-- ms; how many messages and names it keeps; and how many bytes, but the permitted number of short messages always fits.
--   owner  the user who owns the session, or false · user  the one that the message names, '' for none
-- Returns 'stored', its cursor, the previous cursor and the owner.
local function store_message(inbox, owner, user)
  local kept, most, names_most, bytes_most = unpack(inbox.limits)
  local last = redis.call('XREVRANGE', inbox.stream, '+', '-', 'COUNT', 1)
  if inbox.name ~= '' then
    redis.call('ZADD', inbox.names, whole(now), inbox.name)
    redis.call('ZREMRANGEBYRANK', inbox.names, 0, -names_most - 1)
    redis.call('PEXPIRE', inbox.names, kept)
  end
  local cursor = redis.call('XADD', inbox.stream, 'MAXLEN', most, '*', 'm', inbox.body, 'u', owner or user)
  -- The permitted number of short messages fits into the bound. Only a long message has to sum the others.
  if #inbox.body * most > bytes_most + 0 then
    local bytes, oldest = 0, cursor
    for _, entry in ipairs(redis.call('XREVRANGE', inbox.stream, '+', '-')) do
      bytes = bytes + #entry[2][2]
      if bytes > bytes_most + 0 then
        redis.call('XTRIM', inbox.stream, 'MINID', oldest)
        break
      end
      oldest = entry[1]
    end
  end
  redis.call('PEXPIRE', inbox.stream, kept)
  return {'stored', cursor, last[1] and last[1][1] or '0-0', owner or ''}
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
