-- Where users are: when each was last heard of follows from how long their key still has to live.
-- KEYS[1…] {shard}:<user>    text, one key a user: the session of their last frame
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long that tells of a conversation, ms
-- ARGV[3…] one a user: the session
for number = 1, #KEYS do
  redis.call('SET', KEYS[number], ARGV[2 + number], 'PX', ARGV[2])
end
return #KEYS
