-- Takes the oldest prompt that waits to be run again; the same token gets the same prompt once more.
-- With a group, which must be running, it becomes that group's prompt at the same moment.
-- ARGV: token ('' with a group), group id ('' for none).   Reply: 'attempt index task' | nil
local id = ARGV[2]
if id ~= '' then
  local noted = redis.call('HGET', PROMPTS, id)
  if noted then return noted end
  if not redis.call('ZSCORE', RUNNING, id) then return nil end
  local text = redis.call('LPOP', RETRIES)
  if not text then return nil end
  local prompt = read_prompt(text)
  redis.call('HSET', PROMPTS, id, text)
  audit({id}, 'begun', 'p', prompt.task .. ':' .. prompt.index)
  return text
end
local taken = key('once:' .. ARGV[1])
local prompt = redis.call('GET', taken)
if prompt then return prompt end
prompt = redis.call('LPOP', RETRIES)
if prompt then redis.call('SET', taken, prompt, 'EX', '300') end
return prompt
