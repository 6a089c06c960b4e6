-- Frames of sessions of one shard, in the order in which they came.
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:inflight  sorted set: session id by end of lease, ms
-- KEYS[3]  {shard}:policies  hash: version, body
-- KEYS[4]  {shard}:active    sorted set: user id by last frame, ms: customers whose activity is to be noted
-- KEYS[5]  {shard}:paused    sorted set: session id by last frame, ms: those that tool, transfer or queue pauses
-- KEYS[6]  {shard}:counts    hash: how many sessions are armed (a:<tag>) and paused (p:<tag>)
-- KEYS[7]  {shard}:signs     stream: what users did right after guide messages (fields: see `sign`)
-- KEYS[8…] {shard}:s:<id>    hash, one key a frame: the session of that frame
--   u user · c chat · t tag · q, r last seq of user and agent · a armed at, µs · d deadline, ms (0: none) · n nudges
--   s the arming whose silence was the last to be handed in, while nobody has spoken since · p why it is paused
--   e when a pause by typing ends, ms · g the arming that was given grace · m the user began to write · f, v when user
--   and agent last did something, ms · l when it was last renewed by the user, ms · x closed · k key of a gateway (see
--   note_expired) · w what it is counted as (prelude) · z the last guide message (see still_silent)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long a session is kept, ms
-- ARGV[3]  how long a closed one is remembered, ms
-- ARGV[4]  how long typing of the agent pauses, ms
-- ARGV[5]  how often it is renewed, and its customer's activity noted, ms
-- ARGV[6]  how many characters of such a key come before the session's id
-- ARGV[7…] five a frame: side and kind (like u:ping or a:message), user id, chat id or '', seq or '', tag or ''
-- Returns two a frame: 1 counted, 0 dropped for its seq, 2 of no consequence; and the deadline, ms, 0 for none.
local policies = read_policies(KEYS[3])
if not policies then return NO_POLICIES end

local DUE, INFLIGHT, PAUSED, COUNTS = KEYS[1], KEYS[2], KEYS[5], KEYS[6]
local kept, remembered, typing_pause, renewed_every = ARGV[2], ARGV[3], ARGV[4] + 0, ARGV[5] + 0
local id_begins = ARGV[6] + 1
local HARD = {tool = true, transfer = true, queue = true}
local call = redis.call

local change, size -- fields and values that the frame sets
local function put(field, value)
  change[size + 1], change[size + 2], size = field, value, size + 2
end

local function close(key, id, seen, seq, held, was)
  call('DEL', key)
  call('ZREM', DUE, id)
  call('ZREM', INFLIGHT, id)
  call('ZREM', PAUSED, id)
  recount(COUNTS, was, false)
  -- What comes late must not open it again, and its next silence must not bear an old name.
  call('HSET', key, 'x', '1', 'a', next_arming(held[1]))
  if held[9] then call('HSET', key, 'q', held[9]) end
  if held[10] then call('HSET', key, 'r', held[10]) end
  if seq ~= '' then call('HSET', key, seen, seq) end
  call('PEXPIRE', key, remembered)
  return 1, 0
end

-- The first time that the user types, and the first message, within ten minutes of a guide message.
--   e the silence that it went into (session:arming) · k m or t · d how long after it, ms · f for a message, how long
--   after it the user had begun to type, '' for not
local function sign(key, id, kind, mark)
  local armed_at, at, typed = mark:match('^(%d+):(%d+):(%d*)$')
  local after = whole(math.max(0, now - at))
  local late, message = after + 0 > ANSWERED_WITHIN, kind == 'message'
  if late or message then
    call('HDEL', key, 'z')
  elseif kind == 'typing' and typed == '' then
    put('z', armed_at .. ':' .. at .. ':' .. after)
  end
  if not late and (message or (kind == 'typing' and typed == '')) then
    call('XADD', KEYS[7], 'MAXLEN', '~', MOST_SIGNS, '*', 'e', id .. ':' .. armed_at, 'k', kind:sub(1, 1),
      'd', after, 'f', message and typed or '')
  end
end

-- Why it is paused after a frame of this kind, and when a pause by typing ends.
local function pause_after(side, kind, pause, ends)
  if side == 'a' and kind ~= 'ping' then
    if HARD[kind] then return kind, 0 end
    if kind == 'typing' and not HARD[pause] then return 'typing', now + typing_pause end
    if kind ~= 'typing' then return '', 0 end
  end
  if pause == 'typing' and ends <= now then return '', 0 end
  return pause, pause == 'typing' and ends or 0
end

local function note(key, what, user, chat, seq, tag)
  local id, side, kind = key:sub(id_begins), what:sub(1, 1), what:sub(3)
  local held = call('HMGET', key, 'a', 'd', 'n', 't', 'u', 'l', 'x', 'p', 'q', 'r', 'e', 'c', 'w', 'z')
  local by_user, ping, due = side == 'u', kind == 'ping', (held[2] or 0) + 0
  local seen, last = 'r', held[10]
  if by_user then seen, last = 'q', held[9] end
  if seq ~= '' and last and seq + 0 <= last + 0 then return 0, due end
  if kind == 'close' then return close(key, id, seen, seq, held, counted_before(held[13], due, held[4])) end
  -- A closed one is opened by a word of its user, and by nothing else.
  if not by_user and (ping or held[7]) or ping and held[7] then return 2, due end

  change, size = {}, 0
  if seq ~= '' then put(seen, seq) end
  if user ~= held[5] then put('u', user) end
  if chat ~= '' and chat ~= held[12] then put('c', chat) end
  if tag == '' then tag = held[4] or 'default' end
  if tag ~= held[4] then put('t', tag) end

  local renewed = by_user and (not held[6] or now - held[6] >= renewed_every)
  if renewed then
    put('l', now)
    call('ZADD', KEYS[4], now, user)
  end
  local nudges = (held[3] or 0) + 0
  if not ping then
    if by_user then
      nudges = 0
      put('f', now)
      call('HDEL', key, 's', 'x', 'n', 'm')
      if kind == 'typing' then put('m', '1') end
      if held[14] then sign(key, id, kind, held[14]) end
    else
      put('v', now)
      call('HDEL', key, 's')
    end
  end

  local pause, ends = pause_after(side, kind, held[8] or '', (held[11] or 0) + 0)
  if pause ~= (held[8] or '') then put('p', pause) end
  if pause == 'typing' and ends ~= held[11] then put('e', ends) end

  local deadline = 0
  if not HARD[pause] and nudges < policy_of(policies, tag)[4] then
    deadline = math.max(now, ends) + patience(policies, tag, nudges)
    call('ZADD', DUE, deadline, id)
  elseif due > 0 then
    call('ZREM', DUE, id)
  end
  if HARD[pause] then
    call('ZADD', PAUSED, now, id)
  elseif HARD[held[8]] then
    call('ZREM', PAUSED, id)
  end
  local as = (deadline > 0 and 'a:' or HARD[pause] and 'p:') or false
  as = as and as .. counted_as(policies, tag)
  local was = counted_before(held[13], due, held[4])
  if as ~= was then recount(COUNTS, was, as) end
  if not as or as == 'a:' .. tag then
    if held[13] then call('HDEL', key, 'w') end
  elseif as ~= held[13] then
    put('w', as)
  end
  -- Only what was due can be in flight. If the clock went back, the lapse of the lease finds that it is not due.
  if due > 0 and due <= now then call('ZREM', INFLIGHT, id) end
  put('a', next_arming(held[1]))
  put('d', deadline)
  call('HSET', key, unpack(change))
  if renewed or not by_user then call('PEXPIRE', key, kept) end
  return 1, deadline
end

local answers = {}
for number = 0, #KEYS - 8 do
  local at = 7 + number * 5
  local answer = 2 * number + 1
  answers[answer], answers[answer + 1] = note(KEYS[8 + number], unpack(ARGV, at, at + 4))
end
return answers
