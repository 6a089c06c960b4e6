-- Store a message of nobody's side, which is no frame, once per name (for a side's message see note_activity).
-- KEYS[1]  {shard}:s:<id>    hash: the session (fields: see note_activity)
-- KEYS[2]  {shard}:in:<id>   stream: its last messages (see `store_message` in the prelude)
-- KEYS[3]  {shard}:once:<id> sorted set: names of messages by when they came, ms
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2…5] limits of the inbox (see `store_message`)
-- ARGV[6]  the message's name, '' for one that is never repeated
-- ARGV[7]  the message, JSON
-- ARGV[8]  the user who owns the session, '' to skip the check
-- ARGV[9]  1 if the message is stored only where a session is open
-- Returns the outcome (stored, duplicate, no_session, other_user), the cursor, the previous cursor and the owner; '' where
-- nothing was stored or the owner is unknown.
local inbox = {
  stream = KEYS[2], names = KEYS[3], limits = {ARGV[2], ARGV[3], ARGV[4], ARGV[5]}, name = ARGV[6], body = ARGV[7],
}
local duplicate, user = find_duplicate(inbox), ARGV[8]
if duplicate then return duplicate end
local held = redis.call('HMGET', KEYS[1], 'a', 'x', 'u')
if user ~= '' and held[3] and held[3] ~= user then return {'other_user', '', '', ''} end
if ARGV[9] == '1' and (not held[1] or held[2]) then return {'no_session', '', '', ''} end
return store_message(inbox, held[3], user)
