-- Tidies up: expired leases go back to ready, then ready groups that became stale are dropped.
-- ARGV: bound of work.   Reply: {expired, dropped}; either at the bound means there may be more.
local limit = tonumber(ARGV[1])
local num_expired = expire_leases(limit)
return {num_expired, drop_stale_ready(setting('trainer_version'), limit)}
