-- Check before a guide message whether its silence still holds. If the message is sent right after this call, the
-- silence is counted, once, and the user's signs are recorded from then on.
-- KEYS[1]  {shard}:signs     stream: what users did right after guide messages (fields: see note_activity)
-- KEYS[2…] {shard}:s:<id>    hash, one key a silence (fields: see note_activity)
--   z the silence of the last guide message, the time of that message, ms, and the time until the user typed, ms, or ''
--   h the silence of the guide message before. At most two silences can hold at a time, so each is counted once
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  number of characters of a session key before the session id
-- ARGV[3]  time after typing without a message during which the user still counts as typing, ms
-- ARGV[4…] two a silence: its arming; the latest time at which its message is sent, ms, 0 where it is not sent now
-- Returns the time, ms, and for each: 0 it ended, 1 it holds, or the gateway's key to check.
-- An unknown session has had no frame since it was deleted: its silence holds.
local answer = {now}

local function mark(key, armed_at, began, last, mark_before, counted)
  local before, typed = (mark_before or ''):match('^(%d+):%d+:(%d*)$')
  if before ~= armed_at then
    if counted ~= armed_at then redis.call('HINCRBY', key, 'j', 1) end
    if before then redis.call('HSET', key, 'h', before) end
    typed = began == '1' and now - last <= ARGV[3] + 0 and '0' or ''
    if typed == '0' then
      redis.call('XADD', KEYS[1], 'MAXLEN', '~', MOST_SIGNS, '*', 'e', key:sub(ARGV[2] + 1) .. ':' .. armed_at,
        'k', 't', 'd', '0', 'f', '')
    end
  end
  redis.call('HSET', key, 'z', armed_at .. ':' .. whole(now) .. ':' .. typed)
end

for number = 1, #KEYS - 1 do
  local key, armed_at, until_ms = KEYS[1 + number], ARGV[2 + number * 2], ARGV[3 + number * 2] + 0
  local held = redis.call('HMGET', key, 'a', 's', 'k', 'm', 'f', 'z', 'h')
  if held[1] and held[1] ~= armed_at and held[2] ~= armed_at then
    answer[1 + number] = 0
  else
    answer[1 + number] = held[3] or 1
    if now <= until_ms and held[1] and not held[3] then
      mark(key, armed_at, held[4], (held[5] or 0) + 0, held[6], held[7])
    end
  end
end
return answer
