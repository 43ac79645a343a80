-- Deaths of workers that prove nothing against a prompt: many others were under way, and a worker may die
-- for any reason. After so many it runs alone (worker/loop.py); dies its worker then too, it is at fault.
local MAX_DEATHS = 2

-- Ends the running groups of a lost worker, even if they are pushed later. Their prompts run again, but
-- at most MAX_DEATHS times for this reason. If the credit ended by `lost_before` (see lib/server) it does not count
-- against the prompt, because the server may have lost the push.
local function lose_running(ids, reason, lost_before)
  local prompts, lost = redis.call('HMGET', PROMPTS, unpack(ids)), {}
  local deadlines = redis.call('ZMSCORE', CREDITS, unpack(ids))
  leave_running(ids, true)
  audit(ids, 'abandoned', 'r', reason)
  count('abandoned:' .. reason, #ids)
  for i, id in ipairs(ids) do
    local prompt = prompts[i] and read_prompt(prompts[i])
    if prompt then
      lost[#lost + 1] = id
      if finite(deadlines[i], LARGEST) > lost_before then prompt.reruns = prompt.reruns + 1 end
      -- What a suspect sampled may be what killed its workers.
      if prompt.reruns >= MAX_DEATHS then forget_kept({prompts[i]}) end
      if prompt.reruns > MAX_DEATHS then quarantine_prompt(id, prompt, 'worker_died', prompt.reruns)
      else rerun(id, write_prompt(prompt)) end
    end
  end
  leave_tombstones(lost, 'abandoned')
  wake('room')
end
