-- Takes the oldest prompt that waits to be run again; the same token gets the same prompt once more.
-- ARGV: token.   Reply: 'attempt index task' | nil
local taken = key('once:' .. ARGV[1])
local prompt = redis.call('GET', taken)
if prompt then return prompt end
prompt = redis.call('LPOP', RETRIES)
if prompt then redis.call('SET', taken, prompt, 'EX', '300') end
return prompt
