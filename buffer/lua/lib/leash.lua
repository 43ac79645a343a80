-- The trainer's version and the bound on staleness.

local trainer_version = finite(held_settings[1]) or damaged('settings.trainer_version')
local max_staleness = finite(held_settings[2]) or damaged('settings.max_staleness')

local function oldest_fresh(version) return version - max_staleness end
local function groups_per_version()
  return setting('groups_per_step') * setting('gradient_accumulation_steps')
end
