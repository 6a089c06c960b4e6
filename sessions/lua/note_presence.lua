-- Store the session of users' last frames, and when users last wrote.
-- KEYS[1…] {shard}:<user>    text: the session of the user's last frame
--          {shard}w:<user>   text: when the user last wrote a message, ms
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  lifetime of the value, ms
-- ARGV[3…] one a key: the session, or '' for the time
for number = 1, #KEYS do
  local value = ARGV[2 + number]
  redis.call('SET', KEYS[number], value ~= '' and value or whole(now), 'PX', ARGV[2])
end
return #KEYS
