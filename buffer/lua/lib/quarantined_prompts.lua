-- Prompts that are no longer run, and how often the others have failed.

local FAILURES = PREFIX .. 'failures'
local QUARANTINED_PROMPTS = PREFIX .. 'quarantined_prompts'

-- Quarantines a prompt until an operator releases it; `id` is its last group.
local function quarantine_prompt(id, prompt, reason, times)
  redis.call('HSET', QUARANTINED_PROMPTS, prompt.index .. ' ' .. prompt.task,
    whole(now_ms()) .. ' ' .. whole(times) .. ' ' .. reason)
  count('prompts_quarantined:' .. reason, 1)
  audit({id}, 'prompt_quarantined', 'r', reason)
end
