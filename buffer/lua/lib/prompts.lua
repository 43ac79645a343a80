-- Prompts, and the queue of those that run again.
-- @include lib/audit

local RETRIES = PREFIX .. 'retries'

-- As `retries` and `prompts` hold it: 'attempt index task', or 'attempt+reruns index task' if a worker
-- died over it.
local function write_prompt(prompt)
  local reruns = prompt.reruns > 0 and '+' .. whole(prompt.reruns) or ''
  return whole(prompt.attempt) .. reruns .. ' ' .. prompt.index .. ' ' .. prompt.task
end

-- nil if the text is none.
local function read_prompt(text)
  local attempt, reruns, index, task = string.match(text, '^(%d+)%+?(%d*) (%d+) (.*)$')
  local prompt = {attempt = finite(attempt), reruns = finite(reruns, 0), index = index, task = task}
  local fits = prompt.attempt and prompt.attempt < SEQ_RANGE and #index < 20 -- as in the wire format
  return fits and prompt or nil
end

-- Puts the prompt of a group that became too old in line again. A retry is counted, and they end,
-- unless it went for no fault of its own.
local function requeue(prompt, is_counted)
  if on_stale ~= 'requeue' or not (prompt.task and prompt.index) then return end
  if is_counted then
    if prompt.attempt >= setting('max_retries') then return count('retries_exhausted', 1) end
    prompt.attempt = prompt.attempt + 1
  end
  redis.call('RPUSH', RETRIES, write_prompt(prompt))
  count('requeued', 1)
end

-- Puts the prompt of group `id` in line again as it is, whatever the rules for stale groups.
local function rerun(id, text)
  redis.call('RPUSH', RETRIES, text)
  count('rerun', 1)
  audit({id}, 'rerun')
end
