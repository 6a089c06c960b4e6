-- Does this very silence still stand? Asked right before a nudge goes out.
-- KEYS[1…] {shard}:s:<id>    hash, one key a silence (fields: see note_activity)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2…] one a silence: its arming
-- Returns the time, ms, and for each: 0 it is over, 1 it stands, or the gateway's key that tells.
-- A session that is not known any more said nothing since it was forgotten: its silence stands.
local answer = {now}
for number = 1, #KEYS do
  local held = redis.call('HMGET', KEYS[number], 'a', 's', 'k')
  local armed_at = ARGV[1 + number]
  if held[1] and held[1] ~= armed_at and held[2] ~= armed_at then
    answer[1 + number] = 0
  else
    answer[1 + number] = held[3] or 1
  end
end
return answer
