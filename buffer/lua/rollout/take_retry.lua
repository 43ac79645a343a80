-- Takes the oldest prompt to run again; a repeated call with the same token gets the same prompt.
-- With a group, which must be running, it atomically becomes that group's prompt.
-- Request: token (none with a group), group_id (or none).   Reply: 'attempt index task' | nil
local id = request.group_id

-- The oldest entry that is a prompt; others are counted and dropped. nil if there is none, or at the
-- bound of work: the caller retries later in either case.
local function next_retry()
  for _ = 1, MAX_ITEMS do
    local text = redis.call('LPOP', RETRIES)
    if not text then return nil end
    local prompt = read_prompt(text)
    if prompt then return text, prompt end
    count('retries_damaged', 1)
  end
end

if id then
  local noted = redis.call('HGET', PROMPTS, id)
  if noted and read_prompt(noted) then return noted end
  if not redis.call('ZSCORE', RUNNING, id) then return nil end
  local text, prompt = next_retry()
  if not text then return nil end
  redis.call('HSET', PROMPTS, id, text)
  audit({id}, 'begun', 'p', prompt.task .. ':' .. prompt.index)
  return text
end
local taken = key('once:' .. request.token)
local prompt = redis.call('GET', taken)
if prompt then return prompt end
prompt = next_retry()
if prompt then redis.call('SET', taken, prompt, 'EX', '300') end
return prompt
