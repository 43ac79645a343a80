-- Prompts, and the queue of prompts to run again.

local RETRIES = PREFIX .. 'retries'

-- As stored in `retries` and `prompts`: 'attempt index task', or 'attempt+reruns index task' if a worker
-- died while running it.
local function write_prompt(prompt)
  local reruns = prompt.reruns > 0 and '+' .. whole(prompt.reruns) or ''
  return whole(prompt.attempt) .. reruns .. ' ' .. prompt.index .. ' ' .. prompt.task
end

-- nil if the text is not a prompt.
local function read_prompt(text)
  local attempt, reruns, index, task = string.match(text, '^(%d+)%+?(%d*) (%d+) (.*)$')
  local prompt = {attempt = finite(attempt), reruns = finite(reruns, 0), index = index, task = task}
  local fits = prompt.attempt and prompt.attempt < SEQ_RANGE and #index < 20 -- as in the wire format
  return fits and prompt or nil
end

-- Queues the prompt of a dropped group again.
local function requeue(prompt)
  if not (prompt.task and prompt.index) then return end
  redis.call('RPUSH', RETRIES, write_prompt(prompt))
  count('requeued', 1)
end

-- The same for a stale group: if on_stale says so, at most max_retries times.
local function requeue_stale(prompt)
  if on_stale ~= 'requeue' then return end
  if prompt.attempt >= setting('max_retries') then return count('retries_exhausted', 1) end
  prompt.attempt = prompt.attempt + 1
  requeue(prompt)
end

-- Queues the prompt of group `id` again unchanged, regardless of the rules for stale groups.
local function rerun(id, text)
  redis.call('RPUSH', RETRIES, text)
  count('rerun', 1)
  audit({id}, 'rerun')
end
