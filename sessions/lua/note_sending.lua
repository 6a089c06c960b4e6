-- Count guide messages that are sent now, and release the reservations of those that the ledger stopped.
-- KEYS[1]  {shard}:signs     stream: what users did right after guide messages (fields: see note_activity)
-- KEYS[2…] {shard}:s:<id>    hash, one key a silence (fields: see note_activity)
--   h the silences whose guide messages were sent since the user's last action, each with a colon and a newline
--   z the silence of the last guide message, the time of that message, ms, and the time until the user typed, ms, or ''
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  number of characters of a session key before the session id
-- ARGV[3]  time after typing without a message during which the user still counts as typing, ms
-- ARGV[4…] two a silence: its arming; 1 sent, 0 stopped
-- Returns how many were counted. Idempotent.
local counted = 0

local function count(key, armed_at, held)
  local typed = held[6] and held[6]:match('^' .. armed_at .. ':%d+:(%d*)$')
  if not entry_of(held[7], armed_at) then
    redis.call('HSET', key, 'h', (held[7] or '') .. armed_at .. ':\n')
    counted = counted + 1
    if held[4] == '1' and now - (held[5] or 0) <= ARGV[3] + 0 then
      typed = '0'
      redis.call('XADD', KEYS[1], 'MAXLEN', '~', MOST_SIGNALS, '*', 'e', key:sub(ARGV[2] + 1) .. ':' .. armed_at,
        'k', 't', 'd', '0', 'f', '')
    end
  end
  redis.call('HSET', key, 'z', armed_at .. ':' .. whole(now) .. ':' .. (typed or ''))
end

for number = 1, #KEYS - 1 do
  local key, armed_at, sent = KEYS[1 + number], ARGV[2 + number * 2], ARGV[3 + number * 2] == '1'
  local held = redis.call('HMGET', key, 'a', 's', 'k', 'm', 'f', 'z', 'h', 'j')
  local reserved = entry_of(held[8], armed_at)
  local holds = held[1] and not held[3] and (held[1] == armed_at or held[2] == armed_at)
  -- An action of the user has removed both. It starts the limit again, so this message does not count.
  if sent and (reserved or holds) then count(key, armed_at, held) end
  if reserved then
    local others = without(held[8], armed_at)
    if others == '' then redis.call('HDEL', key, 'j') else redis.call('HSET', key, 'j', others) end
  end
end
return counted
