-- Gives the credit of a running group back that will never be pushed.
-- ARGV: group id, reason, and the prompt to run again ('attempt index task'; '' for none).
-- Reply: 1 if the group was running, else 0.
if leave_running({ARGV[1]}) == 0 then return 0 end
count('abandoned:' .. ARGV[2], 1)
if ARGV[3] ~= '' then requeue(read_prompt(ARGV[3]), true) end
wake('room')
audit({ARGV[1]}, 'abandoned', 'r', ARGV[2])
return 1
