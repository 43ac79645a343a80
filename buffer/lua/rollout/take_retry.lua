-- Takes the oldest prompt that waits to be run again; the same token gets the same prompt once more.
-- With a group, which must be running, it becomes that group's prompt at the same moment.
-- ARGV: token ('' with a group), group id ('' for none).   Reply: 'attempt index task' | nil
-- @include lib/audit
-- @include lib/prompts
-- @include lib/running
local id = ARGV[2]

-- The oldest text that is a prompt; what is none is counted and gone. At the bound the caller comes
-- again, as it does when there is none.
local function next_retry()
  for _ = 1, MAX_ITEMS do
    local text = redis.call('LPOP', RETRIES)
    if not text then return nil end
    local prompt = read_prompt(text)
    if prompt then return text, prompt end
    count('retries_damaged', 1)
  end
end

if id ~= '' then
  local noted = redis.call('HGET', PROMPTS, id)
  if noted and read_prompt(noted) then return noted end
  if not redis.call('ZSCORE', RUNNING, id) then return nil end
  local text, prompt = next_retry()
  if not text then return nil end
  redis.call('HSET', PROMPTS, id, text)
  audit({id}, 'begun', 'p', prompt.task .. ':' .. prompt.index)
  return text
end
local taken = key('once:' .. ARGV[1])
local prompt = redis.call('GET', taken)
if prompt then return prompt end
prompt = next_retry()
if prompt then redis.call('SET', taken, prompt, 'EX', '300') end
return prompt
