// For instances that share cores: threads that compute prompts pause between two pieces of work while another process
// computes a step. No process waits for ever, because a turn ends at the time that its owner has written.
#pragma once

namespace baton {

// Call between two pieces of work, in the thread that does them. It costs a few loads while no other process has a turn.
void yield_to_others();

}  // namespace baton
