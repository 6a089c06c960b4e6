-- Return sessions whose deadline has passed, without a claim. `claim_silent` claims them, because a script must be
-- given the keys that it reads.
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:inflight  sorted set: session id by end of lease, ms
-- KEYS[3]  {shard}:policies  hash: version, body
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how many at most
-- Returns the time, ms; the policies' version; the next instant at which something falls due, ms, or -1; and the ids,
-- those with an expired lease first.
local limit = ARGV[2] + 0
local ids = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, limit)
if #ids < limit then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, limit - #ids)) do
    ids[#ids + 1] = id
  end
end
local version = redis.call('HGET', KEYS[3], 'version') or ''
return {now, version, first_of(KEYS[1], KEYS[2]), unpack(ids)}
