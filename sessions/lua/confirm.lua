-- Mark silences as recorded: remove them from the in-flight set and start the timer of the next message.
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:inflight  sorted set: session id by end of lease, ms
-- KEYS[3]  {shard}:policies  hash: version, body
-- KEYS[4]  {shard}:counts    hash: how many sessions are armed and paused (see note_activity)
-- KEYS[5]  {shard}:idle      sorted set: session id by when it lost its timer, ms (prelude)
-- KEYS[6…] {shard}:s:<id>    hash, one key a silence (fields: see note_activity)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long a session is kept, ms
-- ARGV[3…] two a silence: session id, arming
-- Returns how many were still in flight under that arming. Idempotent.
local policies = read_policies(KEYS[3])
if not policies then return NO_POLICIES end

local confirmed = 0
for number = 0, #KEYS - 6 do
  local key, id, armed_at = KEYS[6 + number], ARGV[3 + number * 2], ARGV[4 + number * 2]
  local held = redis.call('HMGET', key, 'a', 'n', 't', 'k', 'w', 'i')
  if held[1] == armed_at and redis.call('ZREM', KEYS[2], id) == 1 then
    confirmed = confirmed + 1
    local nudges, guide, answer = (held[2] or 0) + 1, policies_of(policies, held[3] or 'default')
    local policy = policy_of_timer(guide, answer, held[6])
    local runs = held[6] == WAITING and answer or guide_runs(guide, answer, held[6])
    if nudges < policy.most and not held[4] and runs then
      local deadline = deadline_after(policies, policy, nudges, now)
      redis.call('HSET', key, 'n', nudges, 's', armed_at, 'a', next_arming(armed_at), 'd', deadline)
      redis.call('HDEL', key, 'y')
      redis.call('ZADD', KEYS[1], deadline, id)
      redis.call('PEXPIRE', key, lifetime(ARGV[2], deadline))
    else
      redis.call('HSET', key, 'n', nudges, 's', armed_at, 'd', '0')
      redis.call('HDEL', key, 'w', 'y')
      list_idle(KEYS[5], id)
      recount(KEYS[4], counted_before(held[5], 1, held[3]), false)
    end
  end
end
return confirmed
