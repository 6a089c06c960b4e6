-- Return when users last wrote a message within the conversation window.
-- KEYS[1…] {shard}:<user>  text (see note_presence)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  conversation window, ms
-- Returns a time a key, ms; 0 for none.
local found = redis.call('MGET', unpack(KEYS))
for number, value in ipairs(found) do
  local wrote = value and #value >= 6 and struct.unpack('>I6', value) or 0
  found[number] = wrote <= now and wrote + ARGV[2] > now and wrote or 0
end
return found
