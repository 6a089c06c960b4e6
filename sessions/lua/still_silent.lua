-- Check before a guide message whether its silence still holds. Nothing is counted here: the ledger may still stop the
-- message. Where it may be sent next, it is reserved, so that a frame of the agent counts it until `note_sending` runs.
-- KEYS[1…] {shard}:s:<id>    hash, one key a silence (fields: see note_activity)
--   j the reservations: each the silence, the time of the check, ms, and a newline, like 1767225600000000:1767225661000:
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2…] two a silence: its arming; the latest time at which its message is sent, ms, 0 where it is not sent now
-- Returns the time, ms, and for each: 0 it ended, 1 it holds, or the gateway's key to check.
-- An unknown session has had no frame since it was deleted: its silence holds.
local answer = {now}

for number = 1, #KEYS do
  local key, armed_at, until_ms = KEYS[number], ARGV[number * 2], ARGV[1 + number * 2] + 0
  local held = redis.call('HMGET', key, 'a', 's', 'k', 'h', 'j')
  if held[1] and held[1] ~= armed_at and held[2] ~= armed_at then
    answer[1 + number] = 0
  else
    answer[1 + number] = held[3] or 1
    local goes_out = now <= until_ms and held[1] and not held[3]
    if goes_out and not entry_of(held[4], armed_at) then
      redis.call('HSET', key, 'j', without(held[5], armed_at) .. armed_at .. ':' .. whole(now) .. ':\n')
    end
  end
end
return answer
