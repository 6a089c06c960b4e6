-- Return the number of kombu's unacknowledged messages, and the routing keys of a sample.
-- KEYS[1]  the hash of unacknowledged messages: delivery tag -> [message, exchange, routing key] in JSON
-- ARGV[1]  size of the sample; a message may be long, so only its end is parsed
local answer = {redis.call('HLEN', KEYS[1])}
local sample = redis.call('HRANDFIELD', KEYS[1], ARGV[1], 'WITHVALUES')
for place = 2, #sample, 2 do
  answer[#answer + 1] = string.match(string.sub(sample[place], -200), '"([^"]*)"%]%s*$') or ''
end
return answer
