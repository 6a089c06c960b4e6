-- Give sessions that were armed before the cutoff of a campaign its threshold. Their armings stay.
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:policies  hash: version, body, applied (see find_armed)
-- KEYS[3…] {shard}:s:<id>    hash, one key a session (fields: see note_activity)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  start of the campaign, ms
-- ARGV[3]  its threshold, ms
-- ARGV[4]  its cutoff, ms
-- ARGV[5]  cursor of this batch
-- ARGV[6]  cursor of the next batch, '' after the last
-- ARGV[7]  over how long deadlines are spread that would have passed already, ms
-- ARGV[8]  how long a session is kept, ms
-- ARGV[9…] one a session: its id
-- Returns how many deadlines moved; -1 where another watcher has applied this batch.
local policies = read_policies(KEYS[2])
local campaign = policies and active_campaign(policies)
if not campaign or whole(campaign[1]) ~= ARGV[2] or whole(campaign[3]) ~= ARGV[3] then return -1 end
local cutoff, cursor = applied_campaign(KEYS[2], campaign)
if not cutoff then cutoff, cursor = ARGV[4], '0' end
if cutoff ~= ARGV[4] or cursor ~= ARGV[5] then return -1 end
redis.call('HSET', KEYS[2], 'applied', table.concat({ARGV[2], ARGV[3], cutoff, ARGV[6]}, ':'))

local SOON = 1000 -- ms; what is due so soon stays
local moved = 0

local function rearm(key, id)
  local held = redis.call('HMGET', key, 'a', 'n', 't', 'i', 'p', 'e', 'g', 'k')
  local from = (held[1] or 0) / 1000
  -- An arming after the cutoff has the threshold already. A wait for an agent, a grace and a gateway's key have their own.
  if not held[1] or from >= cutoff + 0 or held[4] == WAITING or held[7] == held[1] or held[8] then return end
  if held[5] == 'typing' then from = math.max(from, held[6] or 0) end
  local policy = policies_of(policies, held[3] or 'default')
  if not policy then return end
  local deadline = math.floor(deadline_after(policies, policy, (held[2] or 0) + 0, from))
  if deadline <= now + SOON then deadline = now + SOON + math.floor(math.random() * ARGV[7]) + 1 end
  redis.call('HSET', key, 'd', deadline)
  redis.call('ZADD', KEYS[1], deadline, id)
  if deadline - now > LONGEST then redis.call('PEXPIRE', key, lifetime(ARGV[8], deadline)) end
  moved = moved + 1
end

for number = 1, #KEYS - 2 do
  local id = ARGV[8 + number]
  local due = redis.call('ZSCORE', KEYS[1], id)
  if due and due + 0 > now + SOON then rearm(KEYS[2 + number], id) end
end
return moved
