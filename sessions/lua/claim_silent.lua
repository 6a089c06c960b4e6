-- Move sessions whose deadline has passed to the in-flight set, those first whose lease has lapsed there.
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:inflight  sorted set: session id by end of lease, ms
-- KEYS[3]  {shard}:policies  hash: version, body
-- KEYS[4]  {shard}:s:        what the sessions' hashes begin with (fields: see note_activity)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how many at most
-- ARGV[3]  lease, ms
-- Returns the time, ms; the policies' version; the next instant at which something falls due, ms, or -1; and for each
-- claimed session its id, user, chat, tag, arming, deadline and the number of the nudge.
local limit, until_ms = ARGV[2] + 0, now + ARGV[3]
local lapsed = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, limit)
local due = {}
if #lapsed < limit then
  due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, limit - #lapsed)
end
local policies = #due > 0 and read_policies(KEYS[3])
local answer = {now, redis.call('HGET', KEYS[3], 'version') or '', -1}

-- A little longer, once an arming, for a user who began to write and did not send it.
local function grace(key, id, held)
  local more = policies and policy_of(policies, held[3])[3] or 0
  if more == 0 or held[7] ~= '1' or held[8] == held[4] then return false end
  redis.call('HSET', key, 'g', held[4], 'd', now + more)
  redis.call('ZADD', KEYS[1], now + more, id)
  return true
end

local function claim(id, anew)
  local key = KEYS[4] .. id
  local held = redis.call('HMGET', key, 'u', 'c', 't', 'a', 'd', 'n', 'm', 'g')
  local deadline = held[1] and (held[5] or 0) + 0 or 0
  if deadline == 0 then
    redis.call('ZREM', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
  elseif anew and deadline > now then
    -- It was armed anew while the clock was behind, and is where it belongs.
    redis.call('ZREM', KEYS[2], id)
  elseif anew or not grace(key, id, held) then
    redis.call('ZREM', KEYS[1], id)
    redis.call('ZADD', KEYS[2], until_ms, id)
    answer[#answer + 1] = {id, held[1], held[2] or '', held[3] or '', held[4] + 0, deadline, (held[6] or 0) + 1}
  end
end

for _, id in ipairs(lapsed) do claim(id, true) end
for _, id in ipairs(due) do claim(id, false) end

for number = 1, 2 do
  local first = redis.call('ZRANGE', KEYS[number], 0, 0, 'WITHSCORES')
  if first[2] and (answer[3] == -1 or first[2] + 0 < answer[3]) then answer[3] = first[2] + 0 end
end
return answer
