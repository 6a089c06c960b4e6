-- Store the session of users' last frames, and when users last wrote, in one value of at most 44 bytes if the session id
-- has 36 characters: the server stores longer ones apart, which costs 40 bytes more a user.
-- KEYS[1…] {shard}:<user>  text: time of the user's last message, ms, 6 bytes, 0 for none; then the session
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  lifetime of the value, ms
-- ARGV[3…] two a key: the session; '1' if the user wrote, else when at the latest, ms, by a repeat of a message that was
--          counted before, '0' without one. '@' before it: all frames are repeats; the session replaces no newer one.
for number, key in ipairs(KEYS) do
  local session, wrote = ARGV[1 + 2 * number], ARGV[2 + 2 * number]
  if wrote == '1' then
    redis.call('SET', key, struct.pack('>I6', now) .. session, 'PX', ARGV[2])
  elseif wrote ~= '0' then
    local known, at = redis.call('GET', key), math.min(wrote:match('%d+') + 0, now)
    local known_at = known and struct.unpack('>I6', known) or 0
    if not known or at > known_at or wrote:sub(1, 1) ~= '@' then
      redis.call('SET', key, struct.pack('>I6', math.max(at, known_at)) .. session, 'PX', ARGV[2])
    end
  else
    local known = redis.call('GETEX', key, 'PX', ARGV[2])
    if not known or known:sub(7) ~= session then
      redis.call('SET', key, (known and known:sub(1, 6) or ('\0'):rep(6)) .. session, 'PX', ARGV[2])
    end
  end
end
return #KEYS
