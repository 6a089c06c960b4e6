-- Does this very silence still stand? Asked before a guide message goes out. Where the message goes out right after this
-- question, the silence is counted, once, and from then on the user's signs are noted.
-- KEYS[1]  {shard}:signs     stream: what users did right after guide messages (fields: see note_activity)
-- KEYS[2…] {shard}:s:<id>    hash, one key a silence (fields: see note_activity)
--   z the silence that a guide message goes into, when, ms, and how long after it the user typed, ms, '' for not yet
--   h the silence that the message before went into: no more than two can stand at a time, so each is counted once
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how many characters of such a key come before the session's id
-- ARGV[3]  how long ago a user who has not sent what they typed is still typing, ms
-- ARGV[4…] two a silence: its arming; until when its message may go out, ms, 0 where it does not go out now
-- Returns the time, ms, and for each: 0 it is over, 1 it stands, or the gateway's key that tells.
-- A session that is not known any more said nothing since it was forgotten: its silence stands.
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
