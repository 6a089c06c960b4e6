-- Frames of sessions of one shard, in the order in which they came.
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:inflight  sorted set: session id by end of lease, ms
-- KEYS[3]  {shard}:policies  hash: version, body
-- KEYS[4]  {shard}:active    sorted set: user id by last frame, ms: customers whose activity is to be noted
-- KEYS[5…] {shard}:s:<id>    hash, one key a frame: the session of that frame
--   u user · c chat · t tag · q, r last seq of user and agent · a armed at, µs · d deadline, ms (0: none) · n nudges
--   s the arming whose silence was the last to be handed in, while nobody has spoken since · p why it is paused
--   e when a pause by typing ends, ms · g grace was given for this arming · m the user began to write · f, v last frame
--   of user and agent, ms · l when activity was last noted, ms · x closed · k key of a gateway (see note_expired)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long a session outlives its last frame or deadline, ms
-- ARGV[3]  how long a closed one is remembered, ms
-- ARGV[4]  how long typing of the agent pauses, ms
-- ARGV[5]  how often a customer's activity is noted at most, ms
-- ARGV[6…] seven a frame: session id, user id, chat id, side (u or a), kind, seq or '', tag or ''
-- Returns two a frame: 1 counted, 0 dropped for its seq, 2 of no consequence; and the deadline, ms, 0 for none.
local policies = read_policies(KEYS[3])
if not policies then return NO_POLICIES end

local kept, remembered, typing_pause, noted_every = ARGV[2] + 0, ARGV[3], ARGV[4] + 0, ARGV[5] + 0
local HARD = {tool = true, transfer = true, queue = true}

local function close(key, id, seen, seq, armed_at)
  redis.call('DEL', key)
  redis.call('ZREM', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
  -- What comes late must not open it again, and its next silence must not bear an old name.
  redis.call('HSET', key, 'x', '1', 'a', whole(next_arming(armed_at)))
  if seq ~= '' then redis.call('HSET', key, seen, seq) end
  redis.call('PEXPIRE', key, remembered)
end

local function note(key, id, user, chat, side, kind, seq, tag)
  local held = redis.call('HMGET', key, 'q', 'r', 'a', 'd', 'n', 't', 'p', 'e', 'l', 'x', 'u', 'c')
  local by_user = side == 'u'
  local seen, last = 'r', held[2]
  if by_user then seen, last = 'q', held[1] end
  if seq ~= '' and last and seq + 0 <= last + 0 then return 0, (held[4] or 0) + 0 end
  if kind == 'close' then
    close(key, id, seen, seq, held[3])
    return 1, 0
  end
  local ping = kind == 'ping'
  if ping and (not by_user or held[10]) then return 2, (held[4] or 0) + 0 end
  if held[10] then redis.call('HDEL', key, 'x') end

  local change, size = {}, 0
  local function set(field, value)
    change[size + 1], change[size + 2] = field, value
    size = size + 2
  end
  if seq ~= '' then set(seen, seq) end
  if user ~= held[11] then set('u', user) end
  if chat ~= '' and chat ~= held[12] then set('c', chat) end
  if tag == '' then tag = held[6] or 'default' end
  if tag ~= held[6] then set('t', tag) end

  local nudges, pause, pause_ends = (held[5] or 0) + 0, held[7] or '', (held[8] or 0) + 0
  if by_user then
    set('f', whole(now))
    if not ping then
      nudges = 0
      set('n', '0'); set('s', '0')
      set('m', kind == 'typing' and '1' or '0')
    end
    if not held[9] or now - held[9] >= noted_every then
      set('l', whole(now))
      redis.call('ZADD', KEYS[4], now, user)
    end
  else
    set('v', whole(now)); set('s', '0')
    if kind == 'message' or kind == 'resume' then
      pause = ''
    elseif HARD[kind] then
      pause = kind
    elseif not HARD[pause] then
      pause, pause_ends = 'typing', now + typing_pause
      set('e', whole(pause_ends))
    end
  end
  if pause == 'typing' and pause_ends <= now then pause = '' end
  if pause ~= (held[7] or '') then set('p', pause) end

  local deadline, spent = 0, nudges >= policy_of(policies, tag)[4]
  -- The last nudge stands: only what a person does ends that silence.
  if not (ping and spent and (held[4] or '0') == '0') then
    if not spent and not HARD[pause] then
      local from = pause == 'typing' and pause_ends or now
      deadline = from + patience(policies, tag, nudges)
    end
    set('a', whole(next_arming(held[3])))
    set('d', whole(deadline)); set('g', '0')
    redis.call('ZREM', KEYS[2], id)
    if deadline > 0 then redis.call('ZADD', KEYS[1], deadline, id) else redis.call('ZREM', KEYS[1], id) end
  end
  redis.call('HSET', key, unpack(change))
  redis.call('PEXPIRE', key, kept + math.max(0, deadline - now))
  return 1, deadline
end

local answers = {}
for number = 0, #KEYS - 5 do
  local at = 6 + number * 7
  answers[#answers + 1], answers[#answers + 2] = note(KEYS[5 + number], unpack(ARGV, at, at + 6))
end
return answers
