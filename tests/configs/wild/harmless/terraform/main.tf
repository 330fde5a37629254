resource "aws_ecs_service" "vllm" {
  name            = "vllm"
  cluster         = aws_ecs_cluster.ml.id
  task_definition = aws_ecs_task_definition.vllm.arn
  desired_count   = 1
}
