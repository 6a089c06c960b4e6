-- Count guide messages that are sent now, and release the reservations of those that the ledger stopped. A stopped one
-- that a frame of the user counted meanwhile is no longer counted.
-- KEYS[1]  {shard}:day:<day> hash: counts of the day (fields: see note_activity)
-- KEYS[2]  {shard}:policies  hash: version, body
-- KEYS[3…] {shard}:s:<id>    hash, one key a silence (fields: see note_activity)
--   h the silences whose guide messages were sent since the user's last action, each with a colon, the
--   key of the policy that counts the message, and a newline
--   z the mark of the last guide message (prelude)
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  time after typing without a message during which the user still counts as typing, ms
-- ARGV[3…] two a silence: its arming; 1 sent, 0 stopped
-- Returns how many were counted. Idempotent.
local policies = read_policies(KEYS[2])
if not policies then return NO_POLICIES end

local counted = 0

local function count(key, armed_at, held)
  local of, _, typed = read_mark(held[6])
  if of ~= armed_at then typed = '' end
  local entry = entry_of(held[7], armed_at)
  local policy = entry and entry:match(':(.*)')
  if not entry then
    policy = counting_policy(policies_of(policies, held[9] or 'default'))
    redis.call('HSET', key, 'h', (held[7] or '') .. armed_at .. ':' .. policy .. '\n')
    counted = counted + 1
    count_today(KEYS[1], 'sent', policy)
    if held[4] == '1' and now - (held[5] or 0) <= ARGV[2] + 0 then
      typed = '0'
      count_today(KEYS[1], 'false', policy)
    end
  end
  redis.call('HSET', key, 'z', build_mark(armed_at, whole(now), typed, '', policy))
end

-- Settle a message that a frame of the user counted while it was reserved.
local function settle(key, armed_at, sent, mark)
  local of, at, typed, fate, policy = read_mark(mark)
  if of ~= armed_at or fate == '' then return end
  if sent and fate == OPEN then
    redis.call('HSET', key, 'z', build_mark(armed_at, at, typed, '', policy))
    return
  end
  redis.call('HDEL', key, 'z')
  if sent then return end
  count_today(KEYS[1], 'sent', policy, -1)
  if typed ~= '' and typed + 0 <= FALSE_WITHIN then
    count_today(KEYS[1], 'false', policy, -1)
  elseif fate == JUDGED then
    count_today(KEYS[1], 'answered', policy, -1)
  end
end

for number = 1, #KEYS - 2 do
  local key, armed_at, sent = KEYS[2 + number], ARGV[1 + number * 2], ARGV[2 + number * 2] == '1'
  local held = redis.call('HMGET', key, 'a', 's', 'k', 'm', 'f', 'z', 'h', 'j', 't')
  local reserved = entry_of(held[8], armed_at)
  local holds = held[1] and not held[3] and (held[1] == armed_at or held[2] == armed_at)
  -- An action of the user has removed both. It starts the limit again, so this message does not count.
  if sent and (reserved or holds) then count(key, armed_at, held) else settle(key, armed_at, sent, held[6]) end
  if reserved then
    local others = without(held[8], armed_at)
    if others == '' then redis.call('HDEL', key, 'j') else redis.call('HSET', key, 'j', others) end
  end
end
return counted
