"""Which options of TRL 0.12 to 1.16 and of ``TrainingArguments`` are options here."""

from __future__ import annotations

from alignment.config.fields import words

TRAINING_ARGUMENTS = words(
    """
    adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size bf16 data_seed dataloader_drop_last dataloader_num_workers
    deepspeed disable_tqdm eval_delay eval_on_start eval_steps eval_strategy fp16 full_determinism
    gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push
    hub_model_id hub_private_repo hub_revision hub_strategy hub_token include_num_input_tokens_seen
    include_tokens_per_second learning_rate liger_kernel_config load_best_model_at_end logging_first_step logging_steps
    logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps metric_for_best_model
    num_train_epochs optim optim_args output_dir overwrite_output_dir per_device_eval_batch_size
    per_device_train_batch_size push_to_hub report_to resume_from_checkpoint run_name save_only_model save_steps
    save_strategy save_total_limit seed tf32 train_sampling_strategy use_cpu use_liger_kernel warmup_ratio warmup_steps
    weight_decay
    """
)
OF_TRL = words(
    """
    activation_offloading alpha assistant_only_loss beta center_rewards_coefficient chat_template_path
    completion_only_loss cpo_alpha dataset_kwargs dataset_num_proc dataset_text_field desirable_weight
    disable_dropout discopop_tau ds3_gather_for_generation eos_token eval_packing generate_during_eval
    generation_kwargs judge label_smoothing loss_type loss_weights max_completion_length max_length max_new_tokens
    max_prompt_length min_p missing_eos_penalty model_adapter_name model_init_kwargs packing packing_strategy
    pad_token precompute_ref_batch_size precompute_ref_log_probs ref_adapter_name ref_model_init_kwargs
    repetition_penalty reward_model_path reward_weights router_aux_loss_coef shuffle_dataset simpo_gamma
    sync_ref_model temperature top_k top_p truncation_mode trust_remote_code undesirable_weight use_liger_loss
    use_transformers_paged
    """
)
