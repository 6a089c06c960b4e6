-- Find sessions that a campaign may arm again, without a change (see rearm).
-- KEYS[1]  {shard}:due       sorted set: session id by deadline, ms
-- KEYS[2]  {shard}:policies  hash: version, body, and the campaign that is or was applied: its start, its threshold, the
--                            cutoff and the cursor of the next batch, '' after the last, like 1767225600000:90000:17672…:0
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how many, about
-- Returns the start, threshold and cutoff of the campaign, the cursor of this batch and of the next one, '' after the
-- last, and the ids. Empty without a campaign, or if it is applied. An edited threshold is another campaign. The cutoff
-- is the time of the first batch: sessions that are armed later have the threshold already.
local policies = read_policies(KEYS[2])
local campaign = policies and active_campaign(policies)
if not campaign then return {} end
local cutoff, cursor = applied_campaign(KEYS[2], campaign)
if not cutoff then cutoff, cursor = whole(now + 1), '0' end
if cursor == '' then return {} end
local found = redis.call('ZSCAN', KEYS[1], cursor, 'COUNT', ARGV[2])
local answer = {whole(campaign[1]), whole(campaign[3]), cutoff, cursor, found[1] == '0' and '' or found[1]}
for number = 1, #found[2], 2 do answer[#answer + 1] = found[2][number] end
return answer
