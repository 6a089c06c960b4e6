-- Store a message in the inbox of a session, once per key.
-- KEYS[1]  {shard}:s:<id>    hash: the session (fields: see note_activity)
-- KEYS[2]  {shard}:in:<id>   stream: its last messages; the entry's id is the cursor; fields m: JSON, u: the user whose
--                            session it was, '' if unknown
-- KEYS[3]  {shard}:once:<id> sorted set: keys of messages by when they came, ms
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  how long an inbox is kept after its last message, ms
-- ARGV[3]  how many messages it keeps
-- ARGV[4]  how many keys it remembers
-- ARGV[5]  the message's key, '' for one that is never repeated
-- ARGV[6]  the message, JSON
-- ARGV[7]  side of the writer (u or a), '' for a system message, which is stored only where a session exists
-- ARGV[8]  seq of that side (prelude: next_in_order) or ''; below 0: a later one follows in the batch, so this is a
--          repeat or a replay
-- ARGV[9]  how many bytes of messages it keeps; the permitted number of short messages always fits
-- ARGV[10] the user who owns the session, '' to skip the check
-- Returns 'stored' and its cursor, or the reason ('duplicate', 'replayed', 'no_session', 'other_user') and ''; then
-- the previous cursor; then the user who owns the session, if known, of a stored message; then 'counted' for a duplicate
-- whose frame, or that of a later message of its side, was counted.
local kept, most, keys_most = ARGV[2], ARGV[3], ARGV[4] + 0
local key, side, seq, most_bytes, user = ARGV[5], ARGV[7], ARGV[8], ARGV[9] + 0, ARGV[10]

local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local before = last[1] and last[1][1] or '0-0'

local held = redis.call('HMGET', KEYS[1], 'a', 'x', 'q', 'r', 'o', 'b', 'u', side == 'u' and 'F' or 'V')
-- Check the key first: a client that repeats a stored message after a lost connection must learn that it is stored, also
-- when the session was closed since.
local stored_at = key ~= '' and redis.call('ZSCORE', KEYS[3], key)
if stored_at then
  local counted = held[8] and held[8] + 0 >= stored_at + 0
  return {'duplicate', '', before, '', counted and 'counted' or nil}
end
if user ~= '' and held[7] and held[7] ~= user then return {'other_user', '', before} end
if side == '' and (not held[1] or held[2]) then return {'no_session', '', before} end
local number = side == 'u' and 3 or 4
if seq ~= '' and not next_in_order(seq, held[number], held[number + 2]) then
  return {'replayed', '', before}
end

if key ~= '' then
  redis.call('ZADD', KEYS[3], whole(now), key)
  redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -keys_most - 1)
  redis.call('PEXPIRE', KEYS[3], kept)
end
local cursor = redis.call('XADD', KEYS[2], 'MAXLEN', most, '*', 'm', ARGV[6], 'u', held[7] or user)
-- The permitted number of short messages fits into the bound. Only a long message has to sum the others.
if #ARGV[6] * most > most_bytes then
  local bytes, oldest = 0, cursor
  for _, entry in ipairs(redis.call('XREVRANGE', KEYS[2], '+', '-')) do
    bytes = bytes + #entry[2][2]
    if bytes > most_bytes then
      redis.call('XTRIM', KEYS[2], 'MINID', oldest)
      break
    end
    oldest = entry[1]
  end
end
redis.call('PEXPIRE', KEYS[2], kept)
-- The frame of a first message sets the owner after this.
return {'stored', cursor, before, held[7] or side == 'u' and user or ''}
