-- Store the session of users' last frames, and when users last wrote, in one value of at most 44 bytes if the session id
-- has 36 characters: the server stores longer ones apart, which costs 40 bytes more a user.
-- KEYS[1…] {shard}:<user>  text: time of the user's last message, ms, 6 bytes, 0 for none; then the session
-- ARGV[1]  clock offset, µs (prelude)
-- ARGV[2]  lifetime of the value, ms
-- ARGV[3…] two a key: the session; '1' if the user wrote
for number, key in ipairs(KEYS) do
  local session, wrote = ARGV[1 + 2 * number], ARGV[2 + 2 * number]
  if wrote == '1' then
    redis.call('SET', key, struct.pack('>I6', now) .. session, 'PX', ARGV[2])
  else
    local known = redis.call('GETEX', key, 'PX', ARGV[2])
    if not known or known:sub(7) ~= session then
      redis.call('SET', key, (known and known:sub(1, 6) or ('\0'):rep(6)) .. session, 'PX', ARGV[2])
    end
  end
end
return #KEYS
