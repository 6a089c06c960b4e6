-- Count frames of sessions of one shard, in order of arrival, and store their messages.
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:inflight  sorted set: session id by end of lease, ms
-- KEYS[3]  {shard}:policies  hash: version, body
-- KEYS[4]  {shard}:active    sorted set: user id by last frame, ms: customers whose activity is to be stored
-- KEYS[5]  {shard}:paused    sorted set: session id by last frame, ms: those that tool, transfer or queue pauses
-- KEYS[6]  {shard}:counts    hash: how many sessions are armed (a:<policy>) and paused (p:<policy>)
-- KEYS[7]  {shard}:day:<day> hash: customers' pauses as <place in PAUSE_ENDS>:<policy>, and guide messages as
--                            sent:<policy>, answered:<policy> and false:<policy>
-- KEYS[8]  {shard}:idle      sorted set: session id by when it lost its timer, ms (prelude)
-- KEYS[9…] {shard}:s:<id>    hash, one key a frame: the session of that frame; after it the keys {shard}:in:<id> and
--                            {shard}:once:<id> of its inbox (see inbox_put) if the frame has a message
--   u user, set by frames of the user only · c chat · t tags, sorted, by newlines · q, r last seq of user and agent
--   o, b epochs of these (prelude) · a armed at, µs · d deadline, ms (0: none) · i who wrote last, once the user has written (prelude)
--   y the arming is claimed
--   n number of recorded silences; a frame of the agent makes it that of guide messages · h guide messages sent since the
--   user's last action (see note_sending) · j guide messages that may be on their way (see still_silent)
--   s the arming of the last recorded silence, removed by the next message · p reason of the pause
--   e when a pause by typing ends, ms · g the arming whose deadline was extended · m the user has typed · f, v last
--   activity of user and agent, ms · l when the user last renewed it, ms · x closed · k key of a gateway (see note_expired) · w what it is counted as (prelude) · z the
--   last guide message (prelude)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long a session is kept, ms
-- ARGV[3]  how long a closed one is remembered, ms
-- ARGV[4]  how long typing of the agent pauses, ms
-- ARGV[5]  how often it is renewed, and its customer's activity stored, ms
-- ARGV[6]  number of characters of a session key before the session id
-- ARGV[7…10] limits of an inbox (see `store_message` in the prelude)
-- ARGV[11…] five a frame: side, flags and kind (like u0ping or a0message), user id ('-' where an agent's side
--          does not know it), chat id or '', seq (see next_in_order) or '', tags or ''; then the name and the body of its
--          message, if it has one
--   flags: 1 the tags are only for a session without any · 2 the user has written before (a ping arms) · 4 the frame has
--   a message
-- Returns two a frame: 1 counted, 2 without effect, 3 refused because the session belongs to another user, 0 or below
-- dropped for its seq, or as its message was stored before: minus field f, so that a repeat restores presence; and the
-- deadline, ms, 0 for none. Then what became of each message: the outcome (stored, duplicate, replayed, other_user), and
-- the cursors and the owner as of inbox_put.
local policies = read_policies(KEYS[3])
if not policies then return NO_POLICIES end

local DUE, INFLIGHT, PAUSED, COUNTS, TODAY, IDLE = KEYS[1], KEYS[2], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local kept, remembered, typing_pause, renewed_every = ARGV[2], ARGV[3], ARGV[4] + 0, ARGV[5] + 0
local id_begins = ARGV[6] + 1
local limits = {ARGV[7], ARGV[8], ARGV[9], ARGV[10]}
local HARD = {tool = true, transfer = true, queue = true}
local call = redis.call

local change, size -- fields and values that the frame sets
local function put(field, value)
  change[size + 1], change[size + 2], size = field, value, size + 2
end

-- Fields kept after a close, so that a late frame or a repeat does not reopen the session; and the time that a repeat
-- restores.
local ORDER = {'q', 'r', 'o', 'b', 'f'}

local function close(key, id, order, armed_at, was)
  local kept = call('HMGET', key, unpack(ORDER))
  call('DEL', key)
  call('ZREM', DUE, id)
  call('ZREM', INFLIGHT, id)
  call('ZREM', PAUSED, id)
  call('ZREM', IDLE, id)
  recount(COUNTS, was, false)
  -- The id of its next silence must be new.
  call('HSET', key, 'x', '1', 'a', next_arming(armed_at))
  for number, field in ipairs(ORDER) do
    local value = order[field] or kept[number]
    if value then call('HSET', key, field, value) end
  end
  call('PEXPIRE', key, remembered)
  return 1, 0
end

-- Judge a guide message by the user's first message or typing within ten minutes of it: one that was not needed is
-- false, and is not answered then. `mark` is field z (prelude).
local function judge(key, kind, mark)
  local armed_at, at, typed, fate, policy = read_mark(mark)
  local after, message = math.max(0, now - (at or 0)), kind == 'message'
  if after > ANSWERED_WITHIN then
    call('HDEL', key, 'z')
    return
  end
  if fate == JUDGED or not message and (kind ~= 'typing' or typed ~= '') then return end
  local first = typed == '' and after or typed + 0
  if message and fate == '' then
    call('HDEL', key, 'z')
  else
    put('z', build_mark(armed_at, at, whole(first), message and JUDGED or fate, policy))
  end
  if message and first > FALSE_WITHIN then
    count_today(TODAY, 'answered', policy)
  elseif typed == '' and after <= FALSE_WITHIN then
    count_today(TODAY, 'false', policy)
  end
end

-- Upper ends of counted pauses, s (see `stats.PAUSE_ENDS`).
local PAUSE_ENDS = {1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1800}

-- Count the time from the last activity of either side to the moment at which the user starts to type or writes.
local function count_pause(key, policy)
  local held = call('HMGET', key, 'f', 'v', 'm', 'x')
  local last = math.max(held[1] or 0, held[2] or 0)
  if last == 0 or held[3] or held[4] then return end
  local place = 1
  while PAUSE_ENDS[place] and now - last >= PAUSE_ENDS[place] * 1000 do place = place + 1 end
  count_today(TODAY, place, policy)
end

-- Return the reason of the pause after a frame of this kind, and when a pause by typing ends.
local function pause_after(by_user, kind, pause, ends)
  if not by_user and kind ~= 'ping' then
    if HARD[kind] then return kind, 0 end
    if kind == 'typing' and not HARD[pause] then return 'typing', now + typing_pause end
    if kind ~= 'typing' then return '', 0 end
  end
  if pause == 'typing' and ends <= now then return '', 0 end
  return pause, pause == 'typing' and ends or 0
end

-- `inbox`: of the frame's message, or nil. `inbox.answer` is set to what became of the message.
local function note(key, inbox, what, user, chat, seq, tags)
  local id, by_user, flags, kind = key:sub(id_begins), what:sub(1, 1) == 'u', what:sub(2, 2) + 0, what:sub(3)
  local number, epoch = by_user and 'q' or 'r', by_user and 'o' or 'b'
  local held = call('HMGET', key, 'a', 'd', 'n', 't', 'u', 'l', 'x', 'p', 'i', 'c', 'w', 'y', number, epoch, 'z')
  local ping, due = kind == 'ping', (held[2] or 0) + 0
  if held[5] and user ~= held[5] and not (kind == 'close' and user == '-') then
    if inbox then inbox.answer = {'other_user', '', '', ''} end
    return 3, due
  end

  local counter, epochs
  if inbox then inbox.answer = find_duplicate(inbox) end
  if seq ~= '' then counter, epochs = next_in_order(seq, held[13], held[14]) end
  if inbox and inbox.answer or seq ~= '' and not counter then
    if inbox then inbox.answer = inbox.answer or {'replayed', '', '', ''} end
    return -(call('HGET', key, 'f') or 0), due
  end
  if inbox then inbox.answer = store_message(inbox, held[5] or by_user and user, user ~= '-' and user or '') end
  if kind == 'close' then
    local order = {[number] = counter, [epoch] = epochs}
    return close(key, id, order, held[1], counted_before(held[11], due, held[4]))
  end
  -- Only a message or typing of its user reopens a closed session.
  if not by_user and (ping or held[7]) or ping and held[7] then return 2, due end

  change, size = {}, 0
  if counter then put(number, counter) end
  if epochs then put(epoch, epochs) end
  if by_user and user ~= held[5] then put('u', user) end
  if chat ~= '' and chat ~= held[10] then put('c', chat) end
  if tags == '' or flags % 2 == 1 and held[4] then tags = held[4] or 'default' end
  local renewed = by_user and (not held[6] or now - held[6] >= renewed_every)
  if renewed then
    put('l', now)
    call('ZADD', KEYS[4], now, user)
    call('PEXPIRE', key, lifetime(kept, due))
  end
  if ping and held[12] then
    -- A guide message for this silence may be on its way. A ping must not end the silence: a new arming would cause a
    -- second message.
    if size > 0 then call('HSET', key, unpack(change)) end
    return 1, due
  end
  if tags ~= held[4] then put('t', tags) end

  local guide, answer = policies_of(policies, tags)
  local writer = held[9]
  if by_user and (kind == 'message' or kind == 'typing') then count_pause(key, counting_policy(guide, answer)) end
  local nudges, written = (held[3] or 0) + 0, writer or due > 0 or held[3]
  local switched = false
  -- Only the agent's message ends the wait for an agent. Frames of the user do not restart it.
  local waits = writer == WAITING and answer and (by_user or kind ~= 'message')
  if by_user and kind == 'message' then
    writer, written = waits and WAITING or USER, true
  elseif by_user and flags % 4 > 1 and not writer then
    writer, written = UNKNOWN, true
  elseif kind == 'message' and writer then
    writer = AGENT
  elseif writer == WAITING and not waits then
    writer, switched = USER, true
  end
  if waits then
    if not ping then put(by_user and 'f' or 'v', now) end
  elseif not ping or switched then
    local guided = (held[3] or held[12]) and call('HMGET', key, 'h', 'j') or {}
    if by_user and not ping then
      nudges = 0
      put('f', now)
      if held[1] then call('HDEL', key, 's', 'x', 'n', 'm', 'y', 'h', 'j') end
      if kind == 'typing' then put('m', '1') end
      -- A message that may be on its way is the last one. It counts here, because `note_sending` comes too late for it.
      local reserved = guided[2] and guided[2]:match('([^\n]*)\n$')
      local mark = held[15]
      if reserved then
        -- By the tags before this frame, which may change them.
        local armed_at, at = reserved:match('^(%d+):(%d+):$')
        local policy = counting_policy(policies_of(policies, held[4] or 'default'))
        mark = build_mark(armed_at, at, '', OPEN, policy)
        call('HSET', key, 'z', mark)
        count_today(TODAY, 'sent', policy)
      end
      if mark then judge(key, kind, mark) end
    else
      if not by_user then put('v', now) end
      -- A silence that the agent answered before its guide message was sent does not count as a guide message. One that
      -- may be on its way counts, so that the policy's limit holds.
      local sent = size_of(guided[1]) + size_of(guided[2])
      if nudges ~= sent then put('n', sent) end
      nudges = sent
      call('HDEL', key, 's', 'y')
    end
  end

  local ended = held[8] == 'typing' and call('HGET', key, 'e')
  local pause, ends = pause_after(by_user, kind, held[8] or '', (ended or 0) + 0)
  if pause ~= (held[8] or '') then put('p', pause) end
  if pause == 'typing' and ends ~= (ended or 0) + 0 then put('e', ends) end

  local deadline = 0
  local waiting = waits or answer and writer == USER
  -- A customer waits for an agent whatever the agent does meanwhile.
  local paused = HARD[pause] and guide and not waiting
  if waits then
    deadline = due
  elseif waiting then
    writer, deadline = WAITING, deadline_after(policies, answer, 0, now)
    call('ZADD', DUE, deadline, id)
    if nudges > 0 then put('n', 0) end
  elseif written and not paused and guide_runs(guide, answer, writer) and nudges < guide.most then
    deadline = deadline_after(policies, guide, nudges, math.max(now, ends))
    call('ZADD', DUE, deadline, id)
  elseif due > 0 then
    call('ZREM', DUE, id)
  end
  if writer and writer ~= held[9] then put('i', writer) end
  if paused then
    call('ZADD', PAUSED, now, id)
  elseif HARD[held[8]] then
    call('ZREM', PAUSED, id)
  end
  local had_none = held[1] and due == 0
  if deadline > 0 or paused then
    if had_none then call('ZREM', IDLE, id) end
  elseif not had_none or HARD[held[8]] or held[7] then
    list_idle(IDLE, id)
  end
  local as = (deadline > 0 and 'a:' or paused and 'p:') or false
  as = as and as .. (waiting and answer or guide).key
  local was = counted_before(held[11], due, held[4])
  if as ~= was then recount(COUNTS, was, as) end
  if not as or as == 'a:' .. tags then
    if held[11] then call('HDEL', key, 'w') end
  elseif as ~= held[11] then
    put('w', as)
  end
  if not waits then
    -- Only a due session can be in flight. If the clock went back, the end of the lease shows that it is not due.
    if held[12] or due > 0 and due <= now then call('ZREM', INFLIGHT, id) end
    put('a', next_arming(held[1]))
    put('d', deadline)
  end
  if size > 0 then call('HSET', key, unpack(change)) end
  if not by_user or not held[1] or deadline - now > LONGEST then
    call('PEXPIRE', key, lifetime(kept, deadline))
  end
  return 1, deadline
end

local answers, inboxes, at, place, number = {}, {}, 11, 9, 1
while KEYS[place] do
  local key, inbox = KEYS[place], nil
  if ARGV[at]:byte(2) >= 52 then -- flag 4
    inbox = {
      stream = KEYS[place + 1], names = KEYS[place + 2], limits = limits, name = ARGV[at + 5], body = ARGV[at + 6],
    }
    inboxes[#inboxes + 1] = inbox
  end
  answers[number], answers[number + 1] = note(key, inbox, unpack(ARGV, at, at + 4))
  number = number + 2
  if inbox then at, place = at + 7, place + 3 else at, place = at + 5, place + 1 end
end
for each = 1, #inboxes do answers[number], number = inboxes[each].answer, number + 1 end
return answers
