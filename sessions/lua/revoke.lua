-- Record that the tokens issued so far are revoked, or only read the time for a new token.
-- KEYS[1]  {shard}:revoked sorted set: session id and side, separated by a newline, by the last revocation, µs
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long a token is valid at most, µs
-- ARGV[3…] what is revoked; none: read the time
-- Returns the time, µs, later than every earlier revocation even if the clock goes back.
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
local at = math.max(now_us, last[2] and last[2] + 1 or 0)
for number = 3, #ARGV do
  redis.call('ZADD', KEYS[1], whole(at), ARGV[number])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(at - ARGV[2]))
redis.call('PEXPIRE', KEYS[1], whole(ARGV[2] / 1000))
return whole(at)
