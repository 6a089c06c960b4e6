-- Move sessions with a passed deadline to the in-flight set. Claim again those whose lease there has expired.
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:inflight  sorted set: session id by end of lease, ms
-- KEYS[3]  {shard}:policies  hash: version, body
-- KEYS[4…] {shard}:s:<id>    hash, one key a session (fields: see note_activity)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  lease, ms
-- ARGV[3]  how long a session is kept, ms
-- ARGV[4…] one a session: its id
-- Returns the time, ms; the policies' version; the next instant at which something falls due, ms, or -1; and for each
-- claimed session its id, user, chat, tags, policy, the policy's version, arming, deadline, the number of the message,
-- and 1 if the timer waited for an agent.
local until_ms = now + ARGV[2]
local policies = read_policies(KEYS[3])
if not policies then return NO_POLICIES end

local answer = {now, redis.call('HGET', KEYS[3], 'version') or '', -1}

-- Extend the deadline once per arming, by the policy of this moment: for every session, or for users who typed and did
-- not send.
local function grace(key, id, policy, held)
  if policy.grace == 0 or held[8] == held[4] then return false end
  if policy.grace_for == 'typing' and (held[7] ~= '1' or held[9] == WAITING) then return false end
  local deadline = after_open(policy.hours, now, policy.grace)
  redis.call('HSET', key, 'g', held[4], 'd', deadline)
  redis.call('ZADD', KEYS[1], deadline, id)
  if deadline - now > LONGEST then redis.call('PEXPIRE', key, lifetime(ARGV[3], deadline)) end
  return true
end

local function claim(key, id, lease_expired)
  local held = redis.call('HMGET', key, 'u', 'c', 't', 'a', 'd', 'n', 'm', 'g', 'i')
  local deadline = held[1] and (held[5] or 0) + 0 or 0
  local guide, answers = policies_of(policies, held[3] or 'default')
  local policy = policy_of_timer(guide, answers, held[9])
  if deadline == 0 then
    redis.call('ZREM', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
  elseif lease_expired and deadline > now then
    -- The session was armed again while the clock was behind. Its entry in the due set is correct.
    redis.call('ZREM', KEYS[2], id)
  elseif lease_expired or not grace(key, id, policy, held) then
    redis.call('ZREM', KEYS[1], id)
    redis.call('ZADD', KEYS[2], until_ms, id)
    redis.call('HSET', key, 'y', '1')
    local waiting = held[9] == WAITING and 1 or 0
    answer[#answer + 1] = {
      id, held[1], held[2] or '', held[3] or '', policy.key, policy.version, held[4] + 0, deadline, (held[6] or 0) + 1,
      waiting,
    }
  end
end

for number = 1, #KEYS - 3 do
  local id = ARGV[3 + number]
  local ends, due = redis.call('ZSCORE', KEYS[2], id), redis.call('ZSCORE', KEYS[1], id)
  if ends and ends + 0 <= now then
    claim(KEYS[3 + number], id, true)
  elseif not ends and due and due + 0 <= now then
    claim(KEYS[3 + number], id, false)
  end
end

answer[3] = first_of(KEYS[1], KEYS[2])
return answer
